"""Nodes that do not answer, and nodes that a run keeps away from."""

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
from rlrun_operator.times import rfc3339
from tests.unit.operator.decide.kube import EPOCH, Kube

SPEC: dict[str, Any] = {
    "trainer": {"replicas": 2},
    "inference": {"replicas": 1},
    "failurePolicy": {"maxRestarts": 10, "backoff": {"initialSeconds": 1, "maxSeconds": 1}},
    "nodeLoss": {"forceDeleteSeconds": 60},
    "progress": {"action": "Report"},
}


def node(name: str, ready: str = "True") -> dict[str, Any]:
    since = {"lastTransitionTime": rfc3339(EPOCH), "reason": "NodeStatusUnknown"}
    return {"metadata": {"name": name}, "status": {"conditions": [{"type": "Ready", "status": ready, **since}]}}


def waiting(nodes: list[dict[str, Any]] | None, spec: dict[str, Any] | None = None) -> Kube:
    """A run whose attempt has ended, and whose trainer pods do not."""
    kube = Kube(SPEC | (spec or {})).start()
    kube.nodes, kube.lingering = nodes, {"trainer"}
    kube.exit("orchestrator", 1)
    kube.tick()
    return kube


@pytest.mark.parametrize(
    ("nodes", "told"),
    [([node("node-1", "Unknown")], "has not answered since 2023-11-14T22:13:20Z"), ([node("node-2")], "no longer exists")],
)  # fmt: skip
def test_pods_of_a_node_that_does_not_answer_are_removed_by_force_when_it_is_time(
    nodes: list[dict[str, Any]], told: str
) -> None:
    kube = waiting(nodes)
    began = kube.now
    kube.tick(15)
    assert f"pod run-trainer-0 is on node node-1, which {told}" in kube.status["message"]
    assert f"deleted by force at {rfc3339(began + 60)}" in kube.status["message"]
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


def test_a_slow_pod_of_a_node_that_answers_is_never_removed_by_force() -> None:
    kube = waiting([node("node-1")])
    kube.tick(100_000)
    assert not [write for write in kube.writes if write.startswith("force")]
    assert "is slow to end on node node-1, which answers" in kube.status["message"]


def test_without_the_right_to_read_nodes_the_message_says_what_a_person_can_do() -> None:
    kube = waiting(None)
    kube.tick(100_000)
    assert not [write for write in kube.writes if write.startswith("force")]
    assert "the state of node node-1 is unknown (readNodes" in kube.status["message"]
    assert "kubectl delete pod run-trainer-0 --force" in kube.status["message"]


def test_without_that_right_the_word_of_the_node_controller_is_taken_after_the_grace_period_too() -> None:
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
def test_a_clock_that_is_wrong_never_makes_the_wait_shorter(ahead: int) -> None:
    """Deletions are timed by the API server, the rest by the operator."""
    kube = Kube(SPEC).start()
    kube.nodes, kube.lingering = [node("node-1", "Unknown")], {"trainer"}
    kube.exit("orchestrator", 1)
    kube.do(kube.decide())
    kube.do(kube.decide())
    kube.controllers()
    for pod in kube.pods("trainer"):
        pod["metadata"]["deletionTimestamp"] = rfc3339(kube.now + 30 + ahead)
    kube.tick(58)
    assert not [write for write in kube.writes if write.startswith("force")]
    kube.tick(3 + max(0, ahead))
    assert len([write for write in kube.writes if write.startswith("force")]) == 2


# ---- exclusion


def by_name(pod: dict[str, Any]) -> str | None:
    """Pod n of the trainer likes node n; all others have a node of their own."""
    name = pod["metadata"]["name"]
    wanted = [f"node-{name[-1]}", "node-7"] if "-trainer-" in name else ["node-9"]
    return next((node for node in wanted if node not in avoided_nodes(pod)), None)


def started(**spec: Any) -> Kube:
    kube = Kube(SPEC | spec)
    kube.place = by_name
    return kube.start()


def fail(kube: Kube, index: int, code: int = 139, message: str = "", *, role: str = "trainer") -> None:
    kube.exit(role, code, index, message=message)
    kube.tick()
    kube.tick(2)
    kube.tick(2)


def nodes_of_trainers(kube: Kube) -> list[str | None]:
    return [pod["spec"].get("nodeName") for pod in kube.pods("trainer")]


def excluded(kube: Kube) -> list[str]:
    return [entry["name"] for entry in kube.status.get("excludedNodes", ())]


def test_the_second_failure_on_a_node_excludes_it_for_an_hour() -> None:
    kube = started()
    engine = kube.pod("inference")["metadata"]["uid"]
    fail(kube, 0, 134, "CudaError: was ended by SIGABRT: ECC")
    assert excluded(kube) == []
    fail(kube, 0)
    entry = kube.status["excludedNodes"][0]
    assert (entry["name"], entry["reason"]) == ("node-0", "failed here: CudaError, Killed")
    assert entry["until"] == rfc3339(kube.now - 5 + 1 + 3600)
    assert (kube.status["attempt"], nodes_of_trainers(kube)) == (3, ["node-7", "node-1"])
    assert kube.pod("inference")["metadata"]["uid"] == engine
    assert ("Warning", "NodeExcluded") in kube.told
    kube.tick(3601)
    assert excluded(kube) == []
    fail(kube, 1)
    assert nodes_of_trainers(kube) == ["node-0", "node-1"]


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
def test_what_is_not_the_nodes_fault_excludes_none(happens: list[tuple[int, int, str]]) -> None:
    kube = started()
    for index, code, message in happens:
        fail(kube, index, code, message)
    assert (excluded(kube), kube.status["restarts"]) == ([], len(happens))


def test_failures_everywhere_exclude_no_node() -> None:
    kube = started(trainer={"replicas": 3})
    for index in (0, 1, 2, 0):
        fail(kube, index)
    assert excluded(kube) == [], "two of four"


def test_failures_long_ago_are_forgotten() -> None:
    kube = started()
    fail(kube, 0)
    kube.tick(3600)
    fail(kube, 0)
    assert excluded(kube) == []


def test_never_more_than_half_of_the_nodes_that_are_known() -> None:
    kube = Kube(SPEC)  # all on one node
    kube.start()
    fail(kube, 0)
    fail(kube, 0)
    assert excluded(kube) == []


def test_a_volume_of_one_node_holds_the_run_there() -> None:
    kube = started(storage={"claimTemplate": {"accessModes": ["ReadWriteOnce"]}})
    fail(kube, 0)
    fail(kube, 0)
    assert excluded(kube) == []


def test_a_node_that_is_lost_twice_is_excluded_though_it_does_not_count() -> None:
    kube = started()
    for _ in range(2):
        kube.disrupt("trainer", 0, reason="DeletionByTaintManager")
        kube.tick()
        kube.tick(2)
        kube.tick(2)
    assert (excluded(kube), kube.status["restartsCountedTowardsMax"]) == (["node-0"], 0)


def only_own(pod: dict[str, Any]) -> str | None:
    found = by_name(pod)
    return None if found == "node-7" else found


def test_an_exclusion_that_leaves_no_node_is_told_and_lifted() -> None:
    kube = started()
    kube.place = only_own
    fail(kube, 0)
    fail(kube, 0)
    kube.tick(5)
    assert kube.condition("Scheduled")["reason"] == "Unschedulable"
    assert "node node-0 is excluded until" in kube.status["message"]
    wake = kube.decide().wake_in
    assert wake is not None
    assert wake <= 60, "no event comes for what does not happen"
    kube.tick(NEEDED_AFTER_SECONDS)
    kube.tick()
    kube.tick()
    assert (excluded(kube), nodes_of_trainers(kube)) == ([], ["node-0", "node-1"])
    assert (kube.status["lastFailure"]["reason"], kube.status["restartsCountedTowardsMax"]) == ("ExcludedNodeNeeded", 2)


def test_a_person_may_end_an_exclusion_in_the_status() -> None:
    kube = started()
    kube.place = only_own
    fail(kube, 0)
    fail(kube, 0)
    kube.tick(5)
    del kube.run["status"]["excludedNodes"]
    kube.tick()
    kube.tick()
    assert (kube.status["lastFailure"]["reason"], nodes_of_trainers(kube)) == ("NodeAllowedAgain", ["node-0", "node-1"])


def test_what_a_drain_leaves_follows_an_edit() -> None:
    kube = Kube(SPEC | {"inference": {"replicas": 4, "minAvailable": 2}}).start()
    budget = Ref("PodDisruptionBudget", "run-inference")
    assert kube.objects[budget]["spec"]["maxUnavailable"] == 2
    before = len(kube.writes)
    kube.tick()
    assert kube.writes[before:] == []
    kube.edit(inference={"replicas": 4, "minAvailable": 1})
    kube.do(kube.decide(), stop_after=0)  # the operator dies before it has done anything
    kube.tick()
    assert kube.objects[budget]["spec"]["maxUnavailable"] == 3
    assert kube.decide().apply == ()


def status_with(until: float, reason: str = "failed here: Killed, Killed") -> RLRunStatus:
    return RLRunStatus(excluded_nodes=[ExcludedNode(name="node-1", until=rfc3339(until), reason=reason)])


def test_annotation_ends_earlier_exclusions_and_no_later_one() -> None:
    earlier, later = status_with(EPOCH + EXCLUDED_SECONDS), status_with(EPOCH + 100 + EXCLUDED_SECONDS)
    asked = rfc3339(EPOCH + 50)
    assert lift_older_exclusions(earlier, asked, EPOCH + 60).excluded_nodes is None
    assert lift_older_exclusions(later, asked, EPOCH + 160) == later
    assert lift_older_exclusions(later, rfc3339(EPOCH + 1e6), EPOCH + 90) == later, "a time in the future counts as now"
    assert lift_older_exclusions(earlier, None, EPOCH + 60) == earlier


def test_annotation_that_is_not_a_time_is_reported_once() -> None:
    noted = lift_older_exclusions(status_with(EPOCH + 1), "tomorrow", EPOCH)
    assert "rlrun.io/use-nodes-again-at (tomorrow) is not a time" in (noted.excluded_nodes or [])[0].reason
    assert lift_older_exclusions(noted, "tomorrow", EPOCH) == noted


def test_running_run_uses_nodes_again_when_it_is_annotated() -> None:
    kube = Kube(SPEC).start()
    excluded = [{"name": "node-9", "until": rfc3339(kube.now + 3000), "reason": "failed here: Killed"}]
    kube.run["status"]["excludedNodes"] = excluded
    kube.tick()
    assert kube.status["excludedNodes"] == excluded
    kube.run["metadata"].setdefault("annotations", {})["rlrun.io/use-nodes-again-at"] = rfc3339(kube.now)
    kube.tick()
    assert not kube.status.get("excludedNodes")
