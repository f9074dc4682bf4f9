"""Correction of the recorded cause while the pods end, because the failure of a peer may be reported first."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.operator.decide.test_nodes import make_node, start_run


def read_failure(kube: Any) -> tuple[Any, ...]:
    found = kube.status["lastFailure"]
    assert kube.status["failures"][-1] == found
    return found["podName"], found.get("exitCode"), found["reason"], found["counted"]


def test_killed_process_replaces_peer_failure_as_cause() -> None:
    kube = start_run()
    kube.lingering = {"trainer"}
    kube.exit("trainer", 1, 1, message="ExitCode: a peer is gone")
    kube.do(kube.decide())
    assert read_failure(kube) == ("run-trainer-1", 1, "ExitCode", True)
    kube.exit("trainer", 137, 0, reason="OOMKilled")
    kube.tick()
    assert read_failure(kube) == ("run-trainer-0", 137, "OOMKilled", True)
    assert (kube.status["restarts"], kube.status["restartsCountedTowardsMax"]) == (1, 1)
    assert len(kube.status["failures"]) == 1
    assert "resources.limits.memory" in kube.status["message"]


def test_late_end_does_not_replace_the_cause() -> None:
    kube = start_run()
    kube.lingering = {"trainer"}
    kube.exit("trainer", 1, 1)
    kube.tick()
    kube.now += 40
    kube.exit("trainer", 137, 0)  # the kubelet, at the end of the grace period
    kube.tick()
    assert read_failure(kube)[:3] == ("run-trainer-1", 1, "ExitCode")


def test_later_independent_failure_does_not_replace_the_cause() -> None:
    kube = start_run()
    kube.exit("trainer", 1, 1)
    kube.do(kube.decide())  # recorded, but no pod has been deleted yet
    kube.now += 11
    kube.exit("trainer", 137, 0, reason="OOMKilled")
    kube.do(kube.decide())
    assert read_failure(kube)[:3] == ("run-trainer-1", 1, "ExitCode")


def test_silent_node_does_not_excuse_an_earlier_failure() -> None:
    kube = start_run()
    kube.nodes, kube.lingering = [make_node("node-0"), make_node("node-1", "Unknown"), make_node("node-9")], {"trainer"}
    kube.exit("trainer", 1, 1)
    for _ in range(4):
        kube.tick(12)
    assert read_failure(kube) == ("run-trainer-1", 1, "ExitCode", True)


def test_failure_caused_by_lost_node_is_uncounted() -> None:
    kube = start_run()
    kube.nodes, kube.lingering = [make_node("node-0", "Unknown"), make_node("node-1"), make_node("node-9")], {"trainer"}
    kube.exit("trainer", 1, 1, message="NcclError: timed out")
    kube.do(kube.decide())
    assert read_failure(kube) == ("run-trainer-1", 1, "NcclError", True)
    for _ in range(3):
        kube.tick(12)
    assert read_failure(kube) == ("run-trainer-0", None, "NodeLost", False)
    assert kube.status["phase"] == "Restarting"
    assert (kube.status["restarts"], kube.status["restartsCountedTowardsMax"]) == (1, 0)
    assert "so that trainer pod run-trainer-1 failed: timed out" in kube.status["message"]
    kube.tick(60)
    assert kube.status["restartsCountedTowardsMax"] == 0, "once"


def test_own_failure_counts_despite_a_lost_node() -> None:
    kube = start_run()
    kube.nodes, kube.lingering = [make_node("node-0", "Unknown"), make_node("node-1"), make_node("node-9")], {"trainer"}
    kube.exit("trainer", 137, 1, reason="OOMKilled")
    kube.tick()
    for _ in range(3):
        kube.tick(12)
    assert read_failure(kube) == ("run-trainer-1", 137, "OOMKilled", True)


def test_deleted_orchestrator_does_not_become_the_cause() -> None:
    kube = start_run()
    kube.lingering = {"trainer", "orchestrator"}
    kube.exit("trainer", 3, 1, message="ExitCode: ValueError: no such file")
    kube.tick()
    kube.now += 1
    kube.last_words("orchestrator")
    kube.tick()
    assert read_failure(kube) == ("run-trainer-1", 3, "ExitCode", True)


def test_new_operator_does_not_blame_a_deleted_pod() -> None:
    kube = start_run()
    kube.lingering = {"trainer", "orchestrator"}
    kube.exit("trainer", 3, 1)
    kube.tick()
    kube.now += 1
    kube.last_words("orchestrator", code=137)
    kube.new_operator()
    kube.tick()
    assert read_failure(kube)[:3] == ("run-trainer-1", 3, "ExitCode")


@pytest.mark.parametrize("behind", [0, 5])
def test_lagging_node_clock_does_not_blame_a_deleted_pod(behind: int) -> None:
    kube = start_run()
    kube.lingering = {"trainer", "orchestrator"}
    kube.exit("trainer", 3, 1)
    kube.tick()
    kube.now -= behind
    kube.exit("orchestrator", 143)
    kube.now += behind
    kube.tick()
    assert read_failure(kube)[:3] == ("run-trainer-1", 3, "ExitCode")


@pytest.mark.parametrize("first", [0, 1])
def test_first_failure_does_not_depend_on_report_order(first: int) -> None:
    """Failures within one second are ordered by role and name; pod 0 leads the group and is usually the cause."""
    kube = start_run()
    kube.lingering = {"trainer"}
    kube.exit("trainer", 3 if first == 0 else 1, first)
    kube.do(kube.decide())
    kube.exit("trainer", 1 if first == 0 else 3, 1 - first)
    kube.tick()
    assert read_failure(kube)[0] == "run-trainer-0"


def test_earlier_peer_failure_replaces_the_cause() -> None:
    kube = start_run()
    kube.lingering = {"trainer"}
    kube.exit("trainer", 1, 0)
    kube.do(kube.decide())
    kube.now -= 2
    kube.exit("trainer", 3, 1)
    kube.now += 2
    kube.tick()
    assert read_failure(kube)[:2] == ("run-trainer-1", 3)


def test_collective_error_is_replaced_by_any_other_failure() -> None:
    kube = start_run()
    kube.lingering = {"trainer"}
    kube.exit("trainer", 1, 0, message="NcclError: connection closed by peer")
    kube.do(kube.decide())
    kube.now += 2
    kube.exit("trainer", 3, 1, message="ExitCode: ValueError: wrong shape")
    kube.tick()
    assert read_failure(kube)[:3] == ("run-trainer-1", 3, "ExitCode")


def test_exit_before_deletion_is_the_cause_if_reported_late() -> None:
    kube = start_run()
    kube.lingering = {"trainer"}
    kube.exit("trainer", 1, 1)
    kube.now += 1
    kube.tick()
    kube.now -= 2
    kube.exit("trainer", 137, 0, reason="OOMKilled")
    kube.now += 3
    kube.shorten(kube.pod("trainer", 0)["metadata"], 0)
    kube.tick()
    assert read_failure(kube)[:3] == ("run-trainer-0", 137, "OOMKilled")


@pytest.mark.parametrize("peer", ["ExitCode: a peer is gone", "NcclError: connection closed by peer"])
def test_permanent_failure_reported_after_its_peer_fails_the_run(peer: str) -> None:
    kube = start_run()
    kube.lingering = {"trainer"}
    kube.exit("trainer", 1, 1, message=peer)
    kube.do(kube.decide())
    assert kube.status["phase"] == "Restarting"
    kube.exit("trainer", 65, 0, message="DataError: line 3 of data.jsonl is no JSON")
    kube.tick()
    assert kube.status["phase"] == "Failed"
    assert read_failure(kube) == ("run-trainer-0", 65, "DataError", False)
    assert len(kube.status["failures"]) == 1
    kube.lingering = set()
    kube.tick(30)
    assert kube.pods("trainer") == []
    assert kube.status["attempt"] == 1


def test_permanent_failure_after_another_failure_does_not_fail_run() -> None:
    kube = start_run()
    kube.lingering = {"trainer"}
    kube.exit("trainer", 1, 1)
    kube.do(kube.decide())
    kube.now += 3
    kube.exit("trainer", 65, 0)
    kube.tick()
    assert kube.status["phase"] == "Restarting"
    assert read_failure(kube)[:3] == ("run-trainer-1", 1, "ExitCode")


def test_permanent_exit_with_restart_rule_becomes_the_cause() -> None:
    rules = [{"name": "again", "action": "Restart", "onExitCodes": [65]}]
    kube = start_run(failurePolicy={"rules": rules})
    kube.lingering = {"trainer"}
    kube.exit("trainer", 1, 1)
    kube.do(kube.decide())
    kube.exit("trainer", 65, 0)
    kube.tick()
    assert kube.status["phase"] == "Restarting"
    assert read_failure(kube)[:3] == ("run-trainer-0", 65, "DataError")
