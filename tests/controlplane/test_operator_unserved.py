"""Status of a run that no operator serves, as the API server's default."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rlrun.api.run_status import UNSERVED
from tests.controlplane.harness import wait_for
from tests.controlplane.world import RUNS, World, run

CRD = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/rlruns.rlrun.io"
Json = dict[str, Any]


def read_statuses(world: World, name: str) -> list[Json]:
    """Return the status of a run from a get, a list, and a list from the cache."""
    field = f"fieldSelector=metadata.name={name}"
    lists = [world.kube.items(world.path(RUNS, "rlruns") + f"?{field}{more}") for more in ("", "&resourceVersion=0")]
    return [found.get("status") or {} for found in (world.run(name), *(items[0] for items in lists if items))]


def read_watched_status(world: World, name: str) -> Json:
    """Return the status of a run in the first event of a watch."""
    path = world.path(RUNS, "rlruns") + f"?watch=true&timeoutSeconds=1&fieldSelector=metadata.name={name}"
    first = json.loads(world.cluster.kubectl("get", "--raw", path).splitlines()[0])
    return dict(first["object"].get("status") or {})


def apply(world: World, document: Json, *options: str) -> str:
    return world.cluster.kubectl("apply", "-n", world.namespace, *options, "-f", "-", stdin=json.dumps(document))


def test_unserved_status_is_visible_without_diff(world: World) -> None:
    document = run("a", managedBy="nobody")
    created = world.kube("POST", world.path(RUNS, "rlruns"), {**document, "metadata": {"name": "b"}})
    assert created["status"] == UNSERVED
    assert apply(world, document).strip().endswith("created")
    assert read_statuses(world, "a") == [UNSERVED] * 3
    assert read_watched_status(world, "a") == UNSERVED
    of_namespace = ("-n", world.namespace)
    assert world.cluster.kubectl("get", "rlr", "a", *of_namespace).splitlines()[1].split()[:2] == ["a", "Unserved"]
    found = world.cluster.kubectl("get", "rlr", *of_namespace, "-o", "name", "--field-selector=status.phase=Unserved")
    assert found.split() == ["rlrun.rlrun.io/a", "rlrun.rlrun.io/b"]
    before = world.run("a")["metadata"]
    assert apply(world, document).strip().endswith("unchanged")
    assert world.cluster.kubectl("diff", *of_namespace, "-f", "-", stdin=json.dumps(document)) == ""
    assert world.run("a")["metadata"] == before
    apply(world, run("a", managedBy="nobody", seed=7))
    assert read_statuses(world, "a") == [UNSERVED] * 3
    assert world.events("a") == []


@pytest.mark.full
def test_unserved_status_belongs_to_no_manager(world: World) -> None:
    team, platform = run("a", managedBy="nobody"), {**run("a"), "spec": {"trainer": {"nodeSelector": {"pool": "b"}}}}

    def both() -> None:
        for manager, document in (("team", team), ("platform", platform)):
            apply(world, document, "--server-side", f"--field-manager={manager}")

    both()
    before = world.run("a")["metadata"]
    both()
    assert world.run("a")["metadata"] == before, "nothing is written"
    owned = [entry["fieldsV1"] for entry in before["managedFields"]]
    assert (len(owned), [fields for fields in owned if "f:status" in fields]) == (2, [])
    assert read_statuses(world, "a") == [UNSERVED] * 3


@pytest.mark.full
def test_first_operator_status_replaces_unserved_default(world: World) -> None:
    world.create("a", managedBy="nobody")
    assert world.status("a") == UNSERVED
    world.edit("a", {"managedBy": None})
    world.wait_phase("a", "Starting")
    world.wait_pods_ready("a", 2)
    status = world.status("a")
    assert status["observedGeneration"] == 2
    assert "no operator" not in status.get("message", "")
    told = world.wait_event("a", "AttemptStarted")
    assert [reason for reason in told if reason != "EnginesAvailable"] == ["AttemptStarted"]
    owners = [entry for entry in world.run("a")["metadata"]["managedFields"] if "f:status" in entry["fieldsV1"]]
    assert [entry["manager"] for entry in owners] == ["rlrun-operator"]


@pytest.mark.full
def test_run_stored_without_status_reports_unserved(world: World) -> None:
    versions = world.kube("GET", CRD)["spec"]["versions"]
    schema = versions[0]["schema"]["openAPIV3Schema"]["properties"]["status"]
    default = schema.pop("default")
    try:
        world.kube("PATCH", CRD, {"spec": {"versions": versions}})
        # The API server applies a new schema a moment later.
        wait_for(
            lambda: world.kube("POST", world.path(RUNS, "rlruns") + "?dryRun=All", run("x")),
            lambda made: "status" not in made,
            "runs begin without a status",
        )
        world.create("a", managedBy="nobody")
        assert read_statuses(world, "a") == [{}] * 3
    finally:
        schema["default"] = default
        world.kube("PATCH", CRD, {"spec": {"versions": versions}})
    # The API server refills its cache last.
    wait_for(
        lambda: world.kube("GET", world.path(RUNS, "rlruns") + "?resourceVersion=0", ok=False),
        lambda answer: [item.get("status") for item in answer.get("items", ())] == [UNSERVED],
        "it says that nobody serves it",
    )
    assert read_statuses(world, "a") == [UNSERVED] * 3
    assert read_watched_status(world, "a") == UNSERVED
