"""Foreign objects with the name of a child: the operator keeps them, reports them and waits for their deletion.

The operator's own builders render the cases, so that new kinds of children are covered.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from rlrun.api.resource import RLRunSpec
from rlrun.api.run_manifest import read_manifest
from rlrun_operator import render
from rlrun_operator.kube.client import address_of
from rlrun_operator.kube.resources import BY_KIND, EVENT, NODE, POD_GROUP, QUOTA, RLRUN, SECRET, WORKLOAD
from rlrun_operator.names import RUN_LABEL, Ref
from rlrun_operator.render import Host, RunContext
from rlrun_operator.settings import RenderSettings
from rlrun_operator.state import Manifest
from tests.controlplane.harness import Json, wait_for
from tests.controlplane.world import World, run

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.yaml"))
NAME = "a"
FULL: dict[str, Any] = {
    "inference": {"replicas": 2},
    "algorithm": {"preset": "grpo", "regularizers": {"kl": 0.04}, "reference": {"model": "team/model"}},
}
"""Specification of a run with every child that is possible without a host."""
HOST: dict[str, Any] = {"trainer": {"lora": {"slots": 2}, "guests": [NAME]}}
GUEST: dict[str, Any] = {"trainer": {"sharedWith": "host", "lora": {}}}
UNSEEN = (POD_GROUP.kind, SECRET.kind, WORKLOAD.kind)
"""Kinds whose name contains the run's UID, so that a foreign object cannot exist before."""


def children(name: str, spec: RLRunSpec, host: Host | None = None) -> dict[Ref, Manifest]:
    """Return all children of a run's first attempt, as the operator renders them."""
    context = RunContext(name, "default", "uid", spec, 1, RenderSettings(), host)
    needs = render.render_prerequisites(context)
    key = render.api_key_secret(context, "k" * 8)
    made = (*needs.create, key, *needs.apply, *render.render_workloads(context).existing)
    return {Ref(child["kind"], child["metadata"]["name"]): child for child in made}


def specified(blocks: dict[str, Any]) -> RLRunSpec:
    return RLRunSpec.model_validate(run(NAME, **blocks)["spec"])


OF_FULL = children(NAME, specified(FULL))
OF_GUEST = children(NAME, specified(GUEST), Host("host", "uid-of-host", specified(HOST), 1))
CASES = [
    *(("full", ref) for ref in OF_FULL if ref.kind not in UNSEEN),
    *(("guest", ref) for ref in OF_GUEST if ref not in OF_FULL and ref.kind not in UNSEEN),
]
IN_GATE = (Ref("StatefulSet", f"{NAME}-trainer"), Ref("ServiceAccount", f"{NAME}-rlrun"))
"""One kind that refuses a wrong spec, and one that an apply would adopt silently. The full set has all kinds."""
WORKLOADS = ("StatefulSet", "Deployment", "Pod")
MADE_LAST = ("Deployment", "Pod")
"""Kinds whose conflict is found after the trainer exists, which then waits."""


def foreign(child: Manifest) -> Json:
    """Return a valid foreign object with the child's kind, name and content, but without its labels."""
    made: Json = copy.deepcopy(dict(child))
    made["metadata"] = {"name": child["metadata"]["name"], "labels": {"app": "ours"}}
    if child["kind"] not in WORKLOADS:
        return made
    pod = {"containers": [{"name": "db", "image": "db"}]}
    if child["kind"] == "Pod":
        return {**made, "spec": pod}
    template = {"metadata": {"labels": {"app": "ours"}}, "spec": pod}
    made["spec"] = {"replicas": 0, "selector": {"matchLabels": {"app": "ours"}}, "template": template}
    return made


def strip_controller_fields(found: Json) -> Json:
    """Return the content written by the owner and the managers of rlrun, without fields that controllers write."""
    metadata = {key: found["metadata"].get(key) for key in ("uid", "labels", "ownerReferences", "deletionTimestamp")}
    managers = {each["manager"] for each in found["metadata"]["managedFields"] if "rlrun" in each["manager"]}
    rest = {key: value for key, value in found.items() if key not in ("metadata", "status", "spec")}
    spec = {key: value for key, value in (found.get("spec") or {}).items() if key not in ("nodeName", "volumeName")}
    return {**rest, "spec": spec, "metadata": metadata, "rlrun": sorted(managers)}


def test_cases_cover_every_kind_of_child() -> None:
    made = {ref.kind for _, ref in CASES} | set(UNSEEN)
    assert made == set(BY_KIND) - {RLRUN.kind, EVENT.kind, NODE.kind, QUOTA.kind}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_cases_cover_children_of_example(path: Path) -> None:
    example = read_manifest(path)
    guest = example.spec.trainer.shared_with
    host = Host(guest, "uid-of-host", specified(HOST), 1) if guest is not None else None
    found = {Ref(r.kind, r.name.removeprefix("run")) for r in children("run", example.spec, host)}
    tried = {Ref(r.kind, r.name.removeprefix(NAME)) for r in (*OF_FULL, *OF_GUEST)}
    assert found <= tried


@pytest.mark.parametrize(
    ("case", "ref"),
    [pytest.param(case, ref, marks=() if ref in IN_GATE else pytest.mark.full) for case, ref in CASES],
    ids=lambda v: v if isinstance(v, str) else f"{v.kind} {v.name}",
)
def test_foreign_object_is_kept_reported_and_waited_for(world: World, case: str, ref: Ref) -> None:
    """The object is neither used nor adopted: an owner reference to the run would delete it with the run."""
    resource, _, _ = address_of((OF_FULL | OF_GUEST)[ref])
    path = resource.path(world.namespace, ref.name)
    before = world.kube("POST", resource.path(world.namespace), foreign((OF_FULL | OF_GUEST)[ref]))
    if case == "guest":
        world.start("host", **HOST)
    world.create(NAME, **(FULL if case == "full" else GUEST))
    words = f"{ref.kind} {ref.name} exists and is not of this run"
    status = wait_for(
        lambda: world.status(NAME),
        lambda s: s.get("reason") == "NameTaken" and words in (s.get("message") or ""),
        f"{words} is told",
    )
    assert (status["phase"], world.condition(NAME, "Scheduled")["reason"]) == ("Pending", "NameTaken")
    if ref.kind not in MADE_LAST:
        assert world.pods(NAME) == []
    assert strip_controller_fields(world.kube("GET", path)) == strip_controller_fields(before)

    world.kube("DELETE", path)
    wait_for(lambda: world.status(NAME).get("phase"), lambda phase: phase == "Starting", "the run begins")
    made = wait_for(lambda: world.kube.get(path), lambda child: child is not None, f"{ref} is made")
    assert made is not None
    assert made["metadata"]["labels"][RUN_LABEL] == NAME


@pytest.mark.full
@pytest.mark.parametrize("ref", [ref for ref in OF_FULL if ref.kind in ("ServiceAccount", "ConfigMap")], ids=str)
def test_copied_run_label_does_not_make_object_owned(world: World, ref: Ref) -> None:
    resource, _, _ = address_of(OF_FULL[ref])
    made = foreign(OF_FULL[ref])
    made["metadata"]["labels"][RUN_LABEL] = NAME
    before = world.kube("POST", resource.path(world.namespace), made)
    world.create(NAME, **FULL)
    world.wait_told(NAME, f"{ref.kind} {ref.name} exists and is not of this run")
    assert strip_controller_fields(
        world.kube("GET", resource.path(world.namespace, ref.name))
    ) == strip_controller_fields(before)


@pytest.mark.full
def test_foreign_pods_with_run_labels_do_not_disturb_run(world: World) -> None:
    world.start(NAME)
    uid = world.run(NAME)["metadata"]["uid"]
    for index, (attempt, ties) in enumerate((("1", {}), ("9" * 62, {"annotations": {"rlrun.io/run-uid": uid}}))):
        labels = {RUN_LABEL: NAME, "rlrun.io/role": "trainer", "rlrun.io/attempt": attempt}
        metadata = {"name": f"{NAME}-trainer-{index + 7}", "labels": labels, **ties}
        pod = {"metadata": metadata, "spec": {"containers": [{"name": "trainer", "image": "x"}]}}
        world.kube("POST", world.path("/api/v1", "pods"), pod)
    world.renew(NAME, 2)
    wait_for(lambda: world.status(NAME)["progress"]["step"], lambda step: step == 2, "the run goes on")
    status = world.status(NAME)
    assert (status["phase"], status["attempt"], status.get("restarts", 0)) == ("Running", 1, 0)


@pytest.mark.full
def test_largest_status_numbers_do_not_prevent_restart(world: World) -> None:
    world.start(NAME)
    most = 2**63 - 1
    node = {"name": "bad name!", "until": "2999-01-01T00:00:00Z", "reason": "r"}
    status = {"restarts": most, "restartsCountedTowardsMax": -most, "excludedNodes": [node]}
    world.kube("PATCH", world.path("/apis/rlrun.io/v1alpha1", "rlruns", NAME) + "/status", {"status": status})
    world.end_container(f"{NAME}-trainer-0", 1)
    assert world.wait_phase(NAME, "Starting", attempt=2)["restarts"] == 1
