"""Unresponsive nodes and excluded nodes."""

from __future__ import annotations

from typing import Any

import pytest

from rlrun.api.run_status import ExcludedNode, RLRunStatus
from rlrun_operator.failures.node_failures import (
    EXCLUDED_SECONDS,
    NEEDED_AFTER_SECONDS,
    avoided_nodes,
    lift_older_exclusions,
)
from rlrun_operator.names import Ref
from rlrun_operator.times import format_rfc3339
from tests.unit.operator.decide.kube import EPOCH, Kube

SPEC: dict[str, Any] = {
    "trainer": {"replicas": 2},
    "inference": {"replicas": 1},
    "failurePolicy": {"maxRestarts": 10, "backoff": {"initialSeconds": 1, "maxSeconds": 1}},
    "nodeLoss": {"forceDeleteSeconds": 60},
    "progress": {"action": "Report"},
}


def make_node(name: str, ready: str = "True") -> dict[str, Any]:
    since = {"lastTransitionTime": format_rfc3339(EPOCH), "reason": "NodeStatusUnknown"}
    return {"metadata": {"name": name}, "status": {"conditions": [{"type": "Ready", "status": ready, **since}]}}


def start_ending_run(nodes: list[dict[str, Any]] | None, spec: dict[str, Any] | None = None) -> Kube:
    """Run whose attempt has ended while its trainer pods do not end."""
    kube = Kube(SPEC | (spec or {})).start()
    kube.nodes, kube.lingering = nodes, {"trainer"}
    kube.exit("orchestrator", 1)
    kube.tick()
    return kube


@pytest.mark.parametrize(
    ("nodes", "told"),
    [([make_node("node-1", "Unknown")], "has not answered since 2023-11-14T22:13:20Z"), ([make_node("node-2")], "no longer exists")],
)  # fmt: skip
def test_pods_of_unresponsive_node_are_force_deleted_after_delay(nodes: list[dict[str, Any]], told: str) -> None:
    kube = start_ending_run(nodes)
    began = kube.now
    kube.tick(15)
    assert f"pod run-trainer-0 is on node node-1, which {told}" in kube.status["message"]
    assert f"deleted by force at {format_rfc3339(began + 60)}" in kube.status["message"]
    assert (kube.decide().wake_in, kube.decide().look_up) == (15, {"nodes"})
    kube.tick(40)
    assert (kube.status["phase"], len(kube.pods("trainer"))) == ("Restarting", 2)
    kube.tick(10)
    assert [write for write in kube.writes if write.startswith("force")] == [
        "force Pod run-trainer-0",
        "force Pod run-trainer-1",
    ]
    kube.tick()
    assert (kube.status["attempt"], kube.attempts_of_trainers()) == (2, {"2"})


def test_slow_pod_of_responsive_node_is_never_force_deleted() -> None:
    kube = start_ending_run([make_node("node-1")])
    kube.tick(100_000)
    assert not [write for write in kube.writes if write.startswith("force")]
    assert "is slow to end on node node-1, which answers" in kube.status["message"]


def test_unknown_node_state_is_reported_with_a_command() -> None:
    kube = start_ending_run(None)
    kube.tick(100_000)
    assert not [write for write in kube.writes if write.startswith("force")]
    assert "the state of node node-1 is unknown (readNodes" in kube.status["message"]
    assert "kubectl delete pod run-trainer-0 --force" in kube.status["message"]


def test_taint_manager_deletion_is_trusted_without_node_access() -> None:
    kube = Kube(SPEC).start()
    kube.lingering = {"trainer"}
    kube.disrupt("trainer", reason="DeletionByTaintManager")
    kube.tick()
    kube.tick(80)
    assert not [write for write in kube.writes if write.startswith("force")], "60 s, and 30 s of grace"
    assert (
        "node node-1, which Kubernetes has given up (DeletionByTaintManager); it is deleted by force at"
        in kube.status["message"]
    )
    kube.tick(10)
    assert [write for write in kube.writes if write.startswith("force")] == ["force Pod run-trainer-0"]


@pytest.mark.parametrize("ahead", [-600, 600])
def test_wrong_clock_never_shortens_the_wait(ahead: int) -> None:
    """Deletion times come from the API server, other times from the operator."""
    kube = Kube(SPEC).start()
    kube.nodes, kube.lingering = [make_node("node-1", "Unknown")], {"trainer"}
    kube.exit("orchestrator", 1)
    kube.do(kube.decide())
    kube.do(kube.decide())
    kube.controllers()
    for pod in kube.pods("trainer"):
        pod["metadata"]["deletionTimestamp"] = format_rfc3339(kube.now + 30 + ahead)
    kube.tick(58)
    assert not [write for write in kube.writes if write.startswith("force")]
    kube.tick(3 + max(0, ahead))
    assert len([write for write in kube.writes if write.startswith("force")]) == 2


# ---- exclusion of nodes


def by_name(pod: dict[str, Any]) -> str | None:
    """Place trainer pod n on node n, and each other pod on its own node."""
    name = pod["metadata"]["name"]
    wanted = [f"node-{name[-1]}", "node-7"] if "-trainer-" in name else ["node-9"]
    return next((node for node in wanted if node not in avoided_nodes(pod)), None)


def start_run(**spec: Any) -> Kube:
    kube = Kube(SPEC | spec)
    kube.place = by_name
    return kube.start()


def fail_role(kube: Kube, index: int, code: int = 139, message: str = "", *, role: str = "trainer") -> None:
    kube.exit(role, code, index, message=message)
    kube.tick()
    kube.tick(2)
    kube.tick(2)


def list_trainer_nodes(kube: Kube) -> list[str | None]:
    return [pod["spec"].get("nodeName") for pod in kube.pods("trainer")]


def list_excluded_nodes(kube: Kube) -> list[str]:
    return [entry["name"] for entry in kube.status.get("excludedNodes", ())]


def test_second_failure_on_a_node_excludes_it() -> None:
    kube = start_run()
    engine = kube.pod("inference")["metadata"]["uid"]
    fail_role(kube, 0, 134, "CudaError: was ended by SIGABRT: ECC")
    assert list_excluded_nodes(kube) == []
    fail_role(kube, 0)
    entry = kube.status["excludedNodes"][0]
    assert (entry["name"], entry["reason"]) == ("node-0", "failed here: CudaError, Killed")
    assert entry["until"] == format_rfc3339(kube.now - 5 + 1 + 3600)
    assert (kube.status["attempt"], list_trainer_nodes(kube)) == (3, ["node-7", "node-1"])
    assert kube.pod("inference")["metadata"]["uid"] == engine
    assert ("Warning", "NodeExcluded") in kube.told
    kube.tick(3601)
    assert list_excluded_nodes(kube) == []
    fail_role(kube, 1)
    assert list_trainer_nodes(kube) == ["node-0", "node-1"]


@pytest.mark.parametrize(
    "happens",
    [
        [(0, 1, ""), (0, 1, "")],
        [(0, 1, "CudaOutOfMemory: x"), (0, 1, "CudaOutOfMemory: x")],
        [(0, 10, ""), (0, 10, "")],
        [(0, 143, ""), (0, 143, "")],
        [(0, 139, ""), (1, 139, ""), (0, 139, ""), (1, 139, "")][:2],
        [(0, 139, ""), (1, 139, ""), (1, 1, "")],
    ],
)
def test_failure_without_node_fault_excludes_no_node(happens: list[tuple[int, int, str]]) -> None:
    kube = start_run()
    for index, code, message in happens:
        fail_role(kube, index, code, message)
    assert (list_excluded_nodes(kube), kube.status["restarts"]) == ([], len(happens))


def test_failures_on_all_nodes_exclude_none() -> None:
    kube = start_run(trainer={"replicas": 3})
    for index in (0, 1, 2, 0):
        fail_role(kube, index)
    assert list_excluded_nodes(kube) == [], "two of four"


def test_old_failures_do_not_exclude_a_node() -> None:
    kube = start_run()
    fail_role(kube, 0)
    kube.tick(3600)
    fail_role(kube, 0)
    assert list_excluded_nodes(kube) == []


def test_exclusion_keeps_half_of_the_known_nodes() -> None:
    kube = Kube(SPEC)  # all pods on one node
    kube.start()
    fail_role(kube, 0)
    fail_role(kube, 0)
    assert list_excluded_nodes(kube) == []


def test_single_node_volume_prevents_exclusion() -> None:
    kube = start_run(storage={"claimTemplate": {"accessModes": ["ReadWriteOnce"]}})
    fail_role(kube, 0)
    fail_role(kube, 0)
    assert list_excluded_nodes(kube) == []


def test_node_lost_twice_is_excluded_without_counting() -> None:
    kube = start_run()
    for _ in range(2):
        kube.disrupt("trainer", 0, reason="DeletionByTaintManager")
        kube.tick()
        kube.tick(2)
        kube.tick(2)
    assert (list_excluded_nodes(kube), kube.status["restartsCountedTowardsMax"]) == (["node-0"], 0)


def only_own(pod: dict[str, Any]) -> str | None:
    found = by_name(pod)
    return None if found == "node-7" else found


def test_exclusion_of_last_node_is_reported_and_lifted() -> None:
    kube = start_run()
    kube.place = only_own
    fail_role(kube, 0)
    fail_role(kube, 0)
    kube.tick(5)
    assert kube.condition("Scheduled")["reason"] == "Unschedulable"
    assert "node node-0 is excluded until" in kube.status["message"]
    wake = kube.decide().wake_in
    assert wake is not None
    assert wake <= 60, "no event comes for what does not happen"
    kube.tick(NEEDED_AFTER_SECONDS)
    kube.tick()
    kube.tick()
    assert (list_excluded_nodes(kube), list_trainer_nodes(kube)) == ([], ["node-0", "node-1"])
    assert (kube.status["lastFailure"]["reason"], kube.status["restartsCountedTowardsMax"]) == ("ExcludedNodeNeeded", 2)


def test_exclusion_can_be_removed_from_the_status() -> None:
    kube = start_run()
    kube.place = only_own
    fail_role(kube, 0)
    fail_role(kube, 0)
    kube.tick(5)
    del kube.run["status"]["excludedNodes"]
    kube.tick()
    kube.tick()
    assert (kube.status["lastFailure"]["reason"], list_trainer_nodes(kube)) == (
        "NodeAllowedAgain",
        ["node-0", "node-1"],
    )


def test_disruption_budget_follows_an_edit() -> None:
    kube = Kube(SPEC | {"inference": {"replicas": 4, "minAvailable": 2}}).start()
    budget = Ref("PodDisruptionBudget", "run-inference")
    assert kube.objects[budget]["spec"]["maxUnavailable"] == 2
    before = len(kube.writes)
    kube.tick()
    assert kube.writes[before:] == []
    kube.edit(inference={"replicas": 4, "minAvailable": 1})
    kube.do(kube.decide(), stop_after=0)  # the operator is killed before its first request
    kube.tick()
    assert kube.objects[budget]["spec"]["maxUnavailable"] == 3
    assert kube.decide().apply == ()


def status_with(until: float, reason: str = "failed here: Killed, Killed") -> RLRunStatus:
    return RLRunStatus(excluded_nodes=[ExcludedNode(name="node-1", until=format_rfc3339(until), reason=reason)])


def test_annotation_ends_only_earlier_exclusions() -> None:
    earlier, later = status_with(EPOCH + EXCLUDED_SECONDS), status_with(EPOCH + 100 + EXCLUDED_SECONDS)
    asked = format_rfc3339(EPOCH + 50)
    assert lift_older_exclusions(earlier, asked, EPOCH + 60).excluded_nodes is None
    assert lift_older_exclusions(later, asked, EPOCH + 160) == later
    assert lift_older_exclusions(later, format_rfc3339(EPOCH + 1e6), EPOCH + 90) == later, (
        "a time in the future counts as now"
    )
    assert lift_older_exclusions(earlier, None, EPOCH + 60) == earlier


def test_invalid_exclusion_annotation_is_reported_once() -> None:
    noted = lift_older_exclusions(status_with(EPOCH + 1), "tomorrow", EPOCH)
    assert "rlrun.io/use-nodes-again-at (tomorrow) is not a time" in (noted.excluded_nodes or [])[0].reason
    assert lift_older_exclusions(noted, "tomorrow", EPOCH) == noted


def test_annotated_run_uses_excluded_nodes_again() -> None:
    kube = Kube(SPEC).start()
    excluded = [{"name": "node-9", "until": format_rfc3339(kube.now + 3000), "reason": "failed here: Killed"}]
    kube.run["status"]["excludedNodes"] = excluded
    kube.tick()
    assert kube.status["excludedNodes"] == excluded
    kube.run["metadata"].setdefault("annotations", {})["rlrun.io/use-nodes-again-at"] = format_rfc3339(kube.now)
    kube.tick()
    assert not kube.status.get("excludedNodes")
