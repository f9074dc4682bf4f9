"""A peer of what has died may be told of first: the record is put right while the pods end."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.operator.decide.test_nodes import node, started


def failure(kube: Any) -> tuple[Any, ...]:
    found = kube.status["lastFailure"]
    assert kube.status["failures"][-1] == found
    return found["podName"], found.get("exitCode"), found["reason"], found["counted"]


def test_a_killed_process_is_the_cause_and_not_the_peer_that_was_told_of_first() -> None:
    kube = started()
    kube.lingering = {"trainer"}
    kube.exit("trainer", 1, 1, message="ExitCode: a peer is gone")
    kube.do(kube.decide())
    assert failure(kube) == ("run-trainer-1", 1, "ExitCode", True)
    kube.exit("trainer", 137, 0, reason="OOMKilled")
    kube.tick()
    assert failure(kube) == ("run-trainer-0", 137, "OOMKilled", True)
    assert (kube.status["restarts"], kube.status["restartsCountedTowardsMax"]) == (1, 1)
    assert len(kube.status["failures"]) == 1
    assert "resources.limits.memory" in kube.status["message"]


def test_what_ends_much_later_or_is_ended_does_not_become_the_cause() -> None:
    kube = started()
    kube.lingering = {"trainer"}
    kube.exit("trainer", 1, 1)
    kube.tick()
    kube.now += 40
    kube.exit("trainer", 137, 0)  # the kubelet, at the end of the grace period
    kube.tick()
    assert failure(kube)[:3] == ("run-trainer-1", 1, "ExitCode")


def test_what_fails_after_a_while_by_itself_does_not_become_the_cause() -> None:
    kube = started()
    kube.exit("trainer", 1, 1)
    kube.do(kube.decide())  # on record, and nobody is asked to end yet
    kube.now += 11
    kube.exit("trainer", 137, 0, reason="OOMKilled")
    kube.do(kube.decide())
    assert failure(kube)[:3] == ("run-trainer-1", 1, "ExitCode")


def test_a_node_that_falls_silent_after_its_own_pod_has_failed_excuses_nothing() -> None:
    kube = started()
    kube.nodes, kube.lingering = [node("node-0"), node("node-1", "Unknown"), node("node-9")], {"trainer"}
    kube.exit("trainer", 1, 1)
    for _ in range(4):
        kube.tick(12)
    assert failure(kube) == ("run-trainer-1", 1, "ExitCode", True)


def test_a_peer_of_a_lost_node_costs_nothing() -> None:
    kube = started()
    kube.nodes, kube.lingering = [node("node-0", "Unknown"), node("node-1"), node("node-9")], {"trainer"}
    kube.exit("trainer", 1, 1, message="NcclError: timed out")
    kube.do(kube.decide())
    assert failure(kube) == ("run-trainer-1", 1, "NcclError", True)
    for _ in range(3):
        kube.tick(12)
    assert failure(kube) == ("run-trainer-0", None, "NodeLost", False)
    assert kube.status["phase"] == "Restarting"
    assert (kube.status["restarts"], kube.status["restartsCountedTowardsMax"]) == (1, 0)
    assert "so that trainer pod run-trainer-1 failed: timed out" in kube.status["message"]
    kube.tick(60)
    assert kube.status["restartsCountedTowardsMax"] == 0, "once"


def test_the_own_failure_of_a_process_counts_whatever_becomes_of_a_node() -> None:
    kube = started()
    kube.nodes, kube.lingering = [node("node-0", "Unknown"), node("node-1"), node("node-9")], {"trainer"}
    kube.exit("trainer", 137, 1, reason="OOMKilled")
    kube.tick()
    for _ in range(3):
        kube.tick(12)
    assert failure(kube) == ("run-trainer-1", 137, "OOMKilled", True)


def test_an_orchestrator_that_ends_because_it_was_told_to_does_not_become_the_cause() -> None:
    kube = started()
    kube.lingering = {"trainer", "orchestrator"}
    kube.exit("trainer", 3, 1, message="ExitCode: ValueError: no such file")
    kube.tick()
    kube.now += 1
    kube.last_words("orchestrator")
    kube.tick()
    assert failure(kube) == ("run-trainer-1", 3, "ExitCode", True)


def test_a_new_operator_that_finds_a_pod_at_its_very_end_does_not_take_it_for_the_cause() -> None:
    kube = started()
    kube.lingering = {"trainer", "orchestrator"}
    kube.exit("trainer", 3, 1)
    kube.tick()
    kube.now += 1
    kube.last_words("orchestrator", code=137)
    kube.new_operator()
    kube.tick()
    assert failure(kube)[:3] == ("run-trainer-1", 3, "ExitCode")


@pytest.mark.parametrize("behind", [0, 5])
def test_clocks_of_nodes_that_are_behind_make_no_cause_of_what_was_told_to_end(behind: int) -> None:
    kube = started()
    kube.lingering = {"trainer", "orchestrator"}
    kube.exit("trainer", 3, 1)
    kube.tick()
    kube.now -= behind
    kube.exit("orchestrator", 143)
    kube.now += behind
    kube.tick()
    assert failure(kube)[:3] == ("run-trainer-1", 3, "ExitCode")


@pytest.mark.parametrize("first", [0, 1])
def test_which_of_two_failed_first_does_not_depend_on_which_was_told_of_first(first: int) -> None:
    """Of two that end within a second, by their roles and names: that is no accident, and mostly right, as pod 0 leads the group."""
    kube = started()
    kube.lingering = {"trainer"}
    kube.exit("trainer", 3 if first == 0 else 1, first)
    kube.do(kube.decide())
    kube.exit("trainer", 1 if first == 0 else 3, 1 - first)
    kube.tick()
    assert failure(kube)[0] == "run-trainer-0"


def test_a_peer_that_ended_a_second_before_the_one_on_record_was_the_first() -> None:
    kube = started()
    kube.lingering = {"trainer"}
    kube.exit("trainer", 1, 0)
    kube.do(kube.decide())
    kube.now -= 2
    kube.exit("trainer", 3, 1)
    kube.now += 2
    kube.tick()
    assert failure(kube)[:2] == ("run-trainer-1", 3)


def test_an_error_of_a_collective_is_an_echo_of_any_other_failure() -> None:
    kube = started()
    kube.lingering = {"trainer"}
    kube.exit("trainer", 1, 0, message="NcclError: connection closed by peer")
    kube.do(kube.decide())
    kube.now += 2
    kube.exit("trainer", 3, 1, message="ExitCode: ValueError: wrong shape")
    kube.tick()
    assert failure(kube)[:3] == ("run-trainer-1", 3, "ExitCode")


def test_what_ended_before_it_was_told_to_is_the_cause_though_that_is_heard_at_its_very_end() -> None:
    kube = started()
    kube.lingering = {"trainer"}
    kube.exit("trainer", 1, 1)
    kube.now += 1
    kube.tick()
    kube.now -= 2
    kube.exit("trainer", 137, 0, reason="OOMKilled")
    kube.now += 3
    kube.shorten(kube.pod("trainer", 0)["metadata"], 0)
    kube.tick()
    assert failure(kube)[:3] == ("run-trainer-0", 137, "OOMKilled")


@pytest.mark.parametrize("peer", ["ExitCode: a peer is gone", "NcclError: connection closed by peer"])
def test_an_end_for_good_that_is_told_after_its_peers_fails_the_run(peer: str) -> None:
    kube = started()
    kube.lingering = {"trainer"}
    kube.exit("trainer", 1, 1, message=peer)
    kube.do(kube.decide())
    assert kube.status["phase"] == "Restarting"
    kube.exit("trainer", 65, 0, message="DataError: line 3 of data.jsonl is no JSON")
    kube.tick()
    assert kube.status["phase"] == "Failed"
    assert failure(kube) == ("run-trainer-0", 65, "DataError", False)
    assert len(kube.status["failures"]) == 1
    kube.lingering = set()
    kube.tick(30)
    assert kube.pods("trainer") == []
    assert kube.status["attempt"] == 1


def test_an_end_for_good_that_came_after_a_failure_is_left_to_the_next_attempt() -> None:
    kube = started()
    kube.lingering = {"trainer"}
    kube.exit("trainer", 1, 1)
    kube.do(kube.decide())
    kube.now += 3
    kube.exit("trainer", 65, 0)
    kube.tick()
    assert kube.status["phase"] == "Restarting"
    assert failure(kube)[:3] == ("run-trainer-1", 1, "ExitCode")


def test_an_end_for_good_that_a_rule_answers_with_a_restart_is_the_cause_and_ends_nothing() -> None:
    rules = [{"name": "again", "action": "Restart", "onExitCodes": [65]}]
    kube = started(failurePolicy={"rules": rules})
    kube.lingering = {"trainer"}
    kube.exit("trainer", 1, 1)
    kube.do(kube.decide())
    kube.exit("trainer", 65, 0)
    kube.tick()
    assert kube.status["phase"] == "Restarting"
    assert failure(kube)[:3] == ("run-trainer-0", 65, "DataError")
