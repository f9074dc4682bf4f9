"""Workloads that a user edits during or after an attempt."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rlrun_operator.names import SPOT_LABEL, Ref
from tests.unit.operator.decide.kube import Kube

ENGINES, TRAINER = Ref("Deployment", "run-inference"), Ref("StatefulSet", "run-trainer")
SPOT = Ref("Deployment", "run-inference-spot")
IMAGE = "spec.template.spec.containers[0].image"
SPEC = {"inference": {"replicas": 2, "spot": {"share": 0.5, "nodeSelector": {"pool": "spot"}}}}


def build_managed_fields(value: Any) -> Any:
    """Managed fields of an applied object, with containers keyed by name."""
    if isinstance(value, dict):
        return {f"f:{name}": build_managed_fields(inner) for name, inner in value.items()}
    if isinstance(value, list) and value and isinstance(value[0], dict) and "image" in value[0]:
        return {f"k:{json.dumps({'name': item['name']})}": {".": {}, **build_managed_fields(item)} for item in value}
    return {}


def mark_applied(kube: Kube, ref: Ref, *, lost: str = "", remembered: bool = True) -> None:
    """Set the store's view of a workload after an apply; `lost` is the field of the first container that a user has set."""
    child = kube.objects[ref]
    whole = build_managed_fields({name: child[name] for name in ("metadata", "spec")})
    for name in ("uid", "name", "namespace", "generation", "creationTimestamp", "annotations", "ownerReferences"):
        whole["f:metadata"].pop(f"f:{name}", None)
    whole["f:metadata"]["f:ownerReferences"] = {}
    accepted = json.dumps(whole)
    if lost:
        containers = whole["f:spec"]["f:template"]["f:spec"]["f:containers"]
        del next(iter(containers.values()))[f"f:{lost}"]
    child |= {"held": json.dumps(whole), "accepted": accepted if remembered else None}


@pytest.mark.parametrize("ref", [ENGINES, TRAINER, SPOT], ids=str)
@pytest.mark.parametrize("remembered", [True, False], ids=["same operator", "restarted operator"])
def test_edited_workload_is_reported_and_repaired(ref: Ref, remembered: bool) -> None:
    kube = Kube(SPEC).start()
    mark_applied(kube, ref, lost="image", remembered=remembered)
    kube.objects[ref]["metadata"]["resourceVersion"] = "77"
    kube.objects[ref]["edits"] = {IMAGE: ["kubectl-set", "registry/evil:1"]}
    decision = kube.decide()
    (repair,) = decision.repair
    assert (repair.manifest["metadata"]["name"], repair.replaces, repair.expect_absent) == (ref.name, "77", False)
    assert repair.manifest["spec"]["replicas"] == kube.objects[ref]["spec"]["replicas"]
    told = next(c for c in decision.status["conditions"] if c["type"] == "ChildrenIntact")
    assert (told["status"], told["reason"]) == ("False", "Drifted")
    assert told["message"] == (
        f"{ref.kind} {ref.name} was edited ({IMAGE} is now registry/evil:1, set by kubectl-set); it is being repaired"
    )


@pytest.mark.parametrize("remembered", [True, False], ids=["same operator", "restarted operator"])
def test_unedited_workloads_are_not_written(remembered: bool) -> None:
    kube = Kube(SPEC).start()
    for ref in (ENGINES, TRAINER, SPOT):
        mark_applied(kube, ref, remembered=remembered)
    decision = kube.decide()
    assert (decision.repair, decision.apply, decision.scale) == ((), (), ())
    assert kube.condition("ChildrenIntact") == {}


def test_removed_field_is_reported() -> None:
    kube = Kube().start()
    mark_applied(kube, TRAINER, lost="env")
    (repair,) = kube.decide().repair
    assert repair.manifest["spec"]["template"]["spec"]["containers"][0]["env"]
    assert "containers[0].env was removed" in str(kube.decide().status)


def test_scaling_is_not_an_edit_and_repair_keeps_replicas() -> None:
    """Surplus engines are drained before they are deleted."""
    kube = Kube({"inference": {"replicas": 2}}).start()
    mark_applied(kube, ENGINES)
    held = json.loads(kube.objects[ENGINES]["held"])
    del held["f:spec"]["f:replicas"]
    kube.objects[ENGINES] |= {"held": json.dumps(held)}
    assert kube.decide().repair == ()
    mark_applied(kube, ENGINES, lost="image")
    kube.objects[ENGINES]["spec"]["replicas"] = 3
    (repair,) = kube.decide().repair
    assert repair.manifest["spec"]["replicas"] == 3


@pytest.mark.parametrize("ref", [ENGINES, SPOT], ids=str)
def test_engines_edited_between_attempts_are_recreated(ref: Ref) -> None:
    """Otherwise engines with a foreign image would serve all later attempts."""
    kube = Kube(SPEC).start()
    kube.place = lambda pod: "node-1" if pod["metadata"]["labels"].get(SPOT_LABEL) or "inference" in str(pod) else None
    kube.lingering = {"trainer", "orchestrator"}
    kube.exit("trainer", 1)
    kube.settle()
    assert kube.condition("Restarting")["status"] == "True"
    mark_applied(kube, ref, lost="image", remembered=False)
    kube.objects[ref]["spec"]["template"]["spec"]["containers"][0]["image"] = "registry/evil:1"
    kube.lingering = set()
    begins = None
    for _ in range(100):
        decision = kube.decide()
        if any(apply.manifest["kind"] == "Pod" for apply in decision.apply):
            begins = decision
            break
        kube.do(decision)
        kube.controllers()
        kube.now += 0.5
    assert begins is not None
    made = [Ref(apply.manifest["kind"], apply.manifest["metadata"]["name"]) for apply in begins.apply]
    assert ref in made, "no attempt meets engines of two renderings"


def test_pending_spec_edit_postpones_the_repair() -> None:
    kube = Kube().start()
    mark_applied(kube, ENGINES, lost="image")
    kube.edit(maxSteps=70)
    kube.settle()
    assert kube.decide().repair == ()


def test_edited_orchestrator_image_waits_for_the_next_attempt() -> None:
    kube = Kube().start()
    pod = kube.ref("orchestrator")
    kube._met[str(kube.uid(pod))]["edits"] = {}
    kube.objects[pod] |= {"held": "{}", "edits": {"spec.containers[0].image": ["kubectl-set", "registry/evil:2"]}}
    decision = kube.decide()
    assert decision.repair == ()
    told = next(c for c in decision.status["conditions"] if c["type"] == "ChildrenIntact")
    assert (
        "spec.containers[0].image is now registry/evil:2, set by kubectl-set); the next attempt recreates it"
        in told["message"]
    )


@pytest.mark.parametrize(
    ("manager", "fix"),
    [
        ("kube-controller-manager", "has to name RLRun run in scaleTargetRef: kubectl get hpa -n team-a lists it"),
        ("kubectl", "kubectl scale rlr run --replicas N scales the engines"),
    ],
)
def test_external_scaling_is_reported_with_the_supported_way(manager: str, fix: str) -> None:
    kube = Kube({"inference": {"replicas": 2}}).start()
    kube.objects[ENGINES]["spec"]["replicas"] = 5
    kube.objects[ENGINES] |= {"held": "{}", "accepted": "{}", "edits": {"spec.replicas": [manager, "5"]}}
    decision = kube.decide()
    (scale,) = decision.scale
    assert (scale.ref, scale.replicas) == (ENGINES, 2)
    told = next(c for c in decision.status["conditions"] if c["type"] == "ChildrenIntact")
    assert (told["status"], told["reason"]) == ("False", "Drifted")
    assert f"was scaled to 5 by {manager}, but inference.replicas of the run makes it 2; " in told["message"]
    assert fix in told["message"]
    assert "being repaired" in told["message"]
    kube.do(decision)
    del kube.objects[ENGINES]["edits"]
    kube.settle()
    assert kube.condition("ChildrenIntact")["reason"] == "Repaired"
    assert fix in kube.condition("ChildrenIntact")["message"]


def test_scaler_with_the_same_target_is_ignored() -> None:
    kube = Kube({"inference": {"replicas": 2}}).start()
    kube.objects[ENGINES] |= {"held": "{}", "accepted": "{}", "edits": {"spec.replicas": ["kubectl", "2"]}}
    kube.settle()
    assert kube.condition("ChildrenIntact") == {}
