"""Preemption and kept room: which runs make room, and which runs wait for it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rlrun_operator.queue.admit import admit_runs
from rlrun_operator.queue.queue_model import Capacity, HeldPod, Plan, QueueRules, QueueState
from tests.unit.operator.queue.test_queue_core import GPU, NOW, RULES, holds, plan, pods, room, run

NODE = (room("node-1"),)
KEEPS = replace(RULES, preemption="Never", reserve_seconds=1000.0)


def stopped(found: Plan) -> set[str]:
    """Names of the runs that are preempted or released."""
    return {uid for uid, verdict in found.verdicts.items() if verdict.stops}


def quarters(namespace: str = "team-a", **more: Any) -> list[Any]:
    """Four runs that hold the only node."""
    return [holds(f"a-{i}", "node-1", 2, namespace=namespace, **more) for i in range(4)]


@pytest.mark.parametrize(("age", "victims"), [(599.0, 0), (600.0, 1)])
def test_run_is_not_preempted_for_a_share_in_its_first_ten_minutes(age: float, victims: int) -> None:
    held = quarters(started=NOW - age)
    assert len(stopped(plan(*held, run("b", pods(1, 2), namespace="team-b"), rooms=NODE))) == victims
    assert len(stopped(plan(*held, run("b", pods(1, 2), priority=1), rooms=NODE))) == 1, "a priority may"


@pytest.mark.parametrize(
    ("preemption", "priority", "victims"),
    [
        ("Never", 1, 0),
        ("Never", 0, 0),
        ("Priority", 1, 1),
        ("Priority", 0, 0),
        ("PriorityAndShare", 1, 1),
        ("PriorityAndShare", 0, 1),
        ("PriorityAndShare", -1, 0),
    ],
)
def test_setting_selects_which_runs_are_preempted(preemption: Any, priority: int, victims: int) -> None:
    rules = replace(RULES, preemption=preemption)
    waits = run("b", pods(1, 2), namespace="team-b", priority=priority)
    assert len(stopped(plan(*quarters(), waits, rooms=NODE, rules=rules))) == victims


def test_namespace_keeps_its_share() -> None:
    waits = run("b", pods(1, 4), namespace="team-b")
    assert stopped(plan(holds("a", "node-1", 6), waits, rooms=NODE)) == set(), "team-a would have nothing"
    assert stopped(plan(holds("a", "node-1", 4), holds("c", "node-1", 2), waits, rooms=NODE)) == {"c"}


def test_namespace_does_not_preempt_beyond_its_own_share() -> None:
    held = [*(holds(f"a-{i}", "node-1", 2) for i in range(3)), holds("b-0", "node-1", 2, namespace="team-b")]
    waits = run("b-1", pods(1, 2), namespace="team-b")
    assert len(stopped(plan(*held, waits, rooms=NODE))) == 1, "half of the node belongs to team-b"
    third = run("c", pods(1, 8), namespace="team-c", priority=-1)
    assert stopped(plan(*held, waits, third, rooms=NODE)) == set(), "a third of the node belongs to team-b"


@pytest.mark.parametrize(("gpus", "victims"), [(2, 1), (4, 0)])
def test_shares_of_a_preemption_follow_the_weights(gpus: int, victims: int) -> None:
    rules = replace(RULES, weights={"team-a": 3.0})
    waits = run("b", pods(1, gpus), namespace="team-b")
    assert len(stopped(plan(*quarters(), waits, rooms=NODE, rules=rules))) == victims


def test_no_run_is_preempted_that_is_not_needed() -> None:
    small = [holds(f"small-{i}", "node-1", 1, started=5.0 + i) for i in range(2)]
    large = holds("large", "node-1", 4, started=1.0)
    waits = run("high", pods(1, 4), priority=5)
    assert stopped(plan(*small, large, waits, rooms=(room("node-1", others=2),))) == {"large"}


def test_victims_of_one_namespace_are_counted_together() -> None:
    """One of two runs that have to go is above the share of team-a, which is 5 of 8 devices."""
    rules = replace(RULES, weights={"team-a": 5.0, "team-b": 2.0})
    held = [*(holds(f"a-{i}", "node-1", 1) for i in range(6)), holds("c", "node-1", 2, namespace="team-c", priority=1)]
    assert stopped(plan(*held, run("b", pods(1, 2), namespace="team-b"), rooms=NODE, rules=rules)) == set()


def test_no_run_is_preempted_if_others_leave_enough_room() -> None:
    leaves = run("a", pods(1, 4), stage="leaving", pods=(HeldPod("trainer", "node-1", {GPU: 4}, ending=True),))
    waits = run("high", pods(1, 4), priority=5)
    assert stopped(plan(leaves, holds("low", "node-1", 4), waits, rooms=NODE)) == set()
    assert stopped(plan(holds("a", "node-1", 4), holds("low", "node-1", 4), waits, rooms=NODE)), "the same without"


def test_run_of_a_lower_priority_is_preempted_first() -> None:
    held = [holds("low", "node-1", 4, started=1.0), holds("middle", "node-1", 4, priority=1, started=9.0)]
    assert stopped(plan(*held, run("high", pods(1, 4), priority=5), rooms=NODE)) == {"low"}
    three = [holds(name, "node-1", gpus, priority=i) for i, (name, gpus) in enumerate({"a": 1, "b": 1, "c": 3}.items())]
    waits = run("high", pods(1, 4), priority=5)
    assert stopped(plan(*three, waits, rooms=(room("node-1", others=3),))) == {"a", "c"}


def test_run_of_the_namespace_furthest_above_its_share_is_preempted_first() -> None:
    held = [holds(f"a-{i}", "node-1", 2, started=1.0) for i in range(3)]
    late = holds("c", "node-1", 2, namespace="team-c", started=9.0)
    waits = run("high", pods(1, 2), namespace="team-d", priority=5)
    assert stopped(plan(*held, late, waits, rooms=NODE)) < {"a-0", "a-1", "a-2"}


def test_run_is_not_preempted_before_its_admission_is_on_record() -> None:
    low, high = run("low", pods(1, 8)), run("high", pods(1, 8), priority=5)
    first = plan(low, rooms=NODE)
    found = plan(low, high, rooms=NODE, state=first.state)
    assert (found.verdicts["low"].admitted, stopped(found)) == (True, set())
    assert stopped(plan(replace(low, stage="holding"), high, rooms=NODE, state=first.state)) == {"low"}


def test_no_run_starts_that_the_scheduler_could_put_into_kept_room() -> None:
    """It fits on node-2 as well, but no scheduler knows of the room that is kept on node-1."""
    rooms = (room("node-1"), room("node-2", 4))
    held, big = holds("x", "node-1", 4), run("big", pods(1, 8), since=NOW - 1000)
    for small, starts in (
        (run("small", pods(1, 4)), False),
        (run("small", pods(1, 4), priority=1), True),
        (run("small", pods(1, 4, spec={"nodeSelector": {"pool": "other"}})), True),
    ):
        nodes = (rooms[0], room("node-2", 4, labels={"pool": "other"}))
        found = plan(held, big, small, rooms=nodes, rules=KEEPS)
        assert found.verdicts["small"].admitted is starts
        assert found.state.reservation is not None


def test_room_is_kept_where_the_oldest_runs_are() -> None:
    held = holds("new", "node-1", 8, started=9.0), holds("old", "node-2", 8, started=1.0)
    big = run("big", pods(1, 8), since=NOW - 1000)
    kept = plan(*held, big, rooms=(room("node-1"), room("node-2")), rules=KEEPS).state.reservation
    assert kept is not None
    assert set(kept.amounts) == {"node-2"}


def test_room_is_kept_for_reserve_seconds_and_then_given_to_others_for_as_long() -> None:
    held, big = holds("x", "node-1", 4), run("big", pods(1, 8), since=NOW - 1000)
    small, state = run("small", pods(1, 4)), QueueState()
    for seconds, starts, keeps in ((0, False, True), (999, False, True), (1000, True, False)):
        found = admit_runs([held, big, small], Capacity(NODE), KEEPS, state, NOW + seconds)
        state = found.state
        assert (found.verdicts["small"].admitted, state.reservation is not None) == (starts, keeps)
    for seconds, keeps in ((1999, False), (2000, True)):
        state = admit_runs([held, big], Capacity(NODE), KEEPS, state, NOW + seconds).state
        assert (state.reservation is not None) is keeps


@pytest.mark.parametrize(("priority", "starts"), [(0, False), (1, False), (2, True)])
def test_run_that_lost_its_room_holds_back_later_runs_up_to_its_priority(priority: int, starts: bool) -> None:
    gang = pods(2, 8)
    lost = replace(holds("a", "node-1", 8, priority=1), gang=(gang,))
    rooms = (room("node-1"), room("node-2", others=4))
    later = run("later", pods(1, 4), priority=priority)
    found = plan(lost, later, rooms=rooms, rules=KEEPS, state=QueueState(lacking={"a": NOW - 1}))
    assert found.verdicts["later"].admitted is starts
    if not starts:
        assert "pods of runs that were admitted before have no nodes yet" in found.verdicts["later"].message


def test_default_times_are_those_of_the_page() -> None:
    rules = QueueRules()
    assert (rules.half_life_seconds, rules.protect_seconds, rules.displaced_seconds) == (6 * 3600, 600, 60)
    assert GPU not in rules.weights
