"""Preemption and kept room: selection of victims, and reservations for waiting runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rlrun_operator.queue.admit import admit_runs
from rlrun_operator.queue.queue_model import Capacity, HeldPod, Plan, QueueRules, QueueState
from tests.unit.operator.queue.test_queue_core import (
    GPU,
    NOW,
    RULES,
    make_holder,
    make_plan,
    make_pod_set,
    make_room,
    make_run,
)

NODE = (make_room("node-1"),)
KEEPS = replace(RULES, preemption="Never", reserve_seconds=1000.0)


def list_stopped(found: Plan) -> set[str]:
    """Names of the preempted or released runs."""
    return {uid for uid, verdict in found.verdicts.items() if verdict.stops}


def make_quarter_runs(namespace: str = "team-a", **more: Any) -> list[Any]:
    """Four runs that hold the only node."""
    return [make_holder(f"a-{i}", "node-1", 2, namespace=namespace, **more) for i in range(4)]


@pytest.mark.parametrize(("age", "victims"), [(599.0, 0), (600.0, 1)])
def test_share_preemption_spares_runs_younger_than_ten_minutes(age: float, victims: int) -> None:
    held = make_quarter_runs(started=NOW - age)
    assert (
        len(list_stopped(make_plan(*held, make_run("b", make_pod_set(1, 2), namespace="team-b"), rooms=NODE)))
        == victims
    )
    assert len(list_stopped(make_plan(*held, make_run("b", make_pod_set(1, 2), priority=1), rooms=NODE))) == 1, (
        "a priority may"
    )


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
def test_preemption_setting_selects_the_victims(preemption: Any, priority: int, victims: int) -> None:
    rules = replace(RULES, preemption=preemption)
    waits = make_run("b", make_pod_set(1, 2), namespace="team-b", priority=priority)
    assert len(list_stopped(make_plan(*make_quarter_runs(), waits, rooms=NODE, rules=rules))) == victims


def test_namespace_keeps_its_share() -> None:
    waits = make_run("b", make_pod_set(1, 4), namespace="team-b")
    assert list_stopped(make_plan(make_holder("a", "node-1", 6), waits, rooms=NODE)) == set(), (
        "team-a would have nothing"
    )
    assert list_stopped(make_plan(make_holder("a", "node-1", 4), make_holder("c", "node-1", 2), waits, rooms=NODE)) == {
        "c"
    }


def test_namespace_does_not_preempt_beyond_its_own_share() -> None:
    held = [
        *(make_holder(f"a-{i}", "node-1", 2) for i in range(3)),
        make_holder("b-0", "node-1", 2, namespace="team-b"),
    ]
    waits = make_run("b-1", make_pod_set(1, 2), namespace="team-b")
    assert len(list_stopped(make_plan(*held, waits, rooms=NODE))) == 1, "half of the node belongs to team-b"
    third = make_run("c", make_pod_set(1, 8), namespace="team-c", priority=-1)
    assert list_stopped(make_plan(*held, waits, third, rooms=NODE)) == set(), "a third of the node belongs to team-b"


@pytest.mark.parametrize(("gpus", "victims"), [(2, 1), (4, 0)])
def test_shares_of_a_preemption_follow_the_weights(gpus: int, victims: int) -> None:
    rules = replace(RULES, weights={"team-a": 3.0})
    waits = make_run("b", make_pod_set(1, gpus), namespace="team-b")
    assert len(list_stopped(make_plan(*make_quarter_runs(), waits, rooms=NODE, rules=rules))) == victims


def test_unneeded_run_is_not_preempted() -> None:
    small = [make_holder(f"small-{i}", "node-1", 1, started=5.0 + i) for i in range(2)]
    large = make_holder("large", "node-1", 4, started=1.0)
    waits = make_run("high", make_pod_set(1, 4), priority=5)
    assert list_stopped(make_plan(*small, large, waits, rooms=(make_room("node-1", others=2),))) == {"large"}


def test_victims_of_one_namespace_are_counted_together() -> None:
    """Only one of the two necessary victims is above the share of team-a, which is 5 of 8 devices."""
    rules = replace(RULES, weights={"team-a": 5.0, "team-b": 2.0})
    held = [
        *(make_holder(f"a-{i}", "node-1", 1) for i in range(6)),
        make_holder("c", "node-1", 2, namespace="team-c", priority=1),
    ]
    assert (
        list_stopped(make_plan(*held, make_run("b", make_pod_set(1, 2), namespace="team-b"), rooms=NODE, rules=rules))
        == set()
    )


def test_leaving_runs_prevent_a_preemption() -> None:
    leaves = make_run(
        "a", make_pod_set(1, 4), stage="leaving", pods=(HeldPod("trainer", "node-1", {GPU: 4}, ending=True),)
    )
    waits = make_run("high", make_pod_set(1, 4), priority=5)
    assert list_stopped(make_plan(leaves, make_holder("low", "node-1", 4), waits, rooms=NODE)) == set()
    assert list_stopped(make_plan(make_holder("a", "node-1", 4), make_holder("low", "node-1", 4), waits, rooms=NODE)), (
        "the same without"
    )


def test_run_of_lowest_priority_is_preempted_first() -> None:
    held = [make_holder("low", "node-1", 4, started=1.0), make_holder("middle", "node-1", 4, priority=1, started=9.0)]
    assert list_stopped(make_plan(*held, make_run("high", make_pod_set(1, 4), priority=5), rooms=NODE)) == {"low"}
    three = [
        make_holder(name, "node-1", gpus, priority=i) for i, (name, gpus) in enumerate({"a": 1, "b": 1, "c": 3}.items())
    ]
    waits = make_run("high", make_pod_set(1, 4), priority=5)
    assert list_stopped(make_plan(*three, waits, rooms=(make_room("node-1", others=3),))) == {"a", "c"}


def test_run_of_namespace_furthest_above_share_is_preempted_first() -> None:
    held = [make_holder(f"a-{i}", "node-1", 2, started=1.0) for i in range(3)]
    late = make_holder("c", "node-1", 2, namespace="team-c", started=9.0)
    waits = make_run("high", make_pod_set(1, 2), namespace="team-d", priority=5)
    assert list_stopped(make_plan(*held, late, waits, rooms=NODE)) < {"a-0", "a-1", "a-2"}


def test_run_is_not_preempted_before_its_admission_is_recorded() -> None:
    low, high = make_run("low", make_pod_set(1, 8)), make_run("high", make_pod_set(1, 8), priority=5)
    first = make_plan(low, rooms=NODE)
    found = make_plan(low, high, rooms=NODE, state=first.state)
    assert (found.verdicts["low"].admitted, list_stopped(found)) == (True, set())
    assert list_stopped(make_plan(replace(low, stage="holding"), high, rooms=NODE, state=first.state)) == {"low"}


def test_run_that_could_use_kept_room_does_not_start() -> None:
    """It fits on node-2 as well, but the scheduler is not aware of the reservation on node-1."""
    rooms = (make_room("node-1"), make_room("node-2", 4))
    held, big = make_holder("x", "node-1", 4), make_run("big", make_pod_set(1, 8), since=NOW - 1000)
    for small, starts in (
        (make_run("small", make_pod_set(1, 4)), False),
        (make_run("small", make_pod_set(1, 4), priority=1), True),
        (make_run("small", make_pod_set(1, 4, spec={"nodeSelector": {"pool": "other"}})), True),
    ):
        nodes = (rooms[0], make_room("node-2", 4, labels={"pool": "other"}))
        found = make_plan(held, big, small, rooms=nodes, rules=KEEPS)
        assert found.verdicts["small"].admitted is starts
        assert found.state.reservation is not None


def test_room_is_kept_on_nodes_of_the_oldest_runs() -> None:
    held = make_holder("new", "node-1", 8, started=9.0), make_holder("old", "node-2", 8, started=1.0)
    big = make_run("big", make_pod_set(1, 8), since=NOW - 1000)
    kept = make_plan(*held, big, rooms=(make_room("node-1"), make_room("node-2")), rules=KEEPS).state.reservation
    assert kept is not None
    assert set(kept.amounts) == {"node-2"}


def test_reservation_alternates_with_free_room_every_reserve_seconds() -> None:
    held, big = make_holder("x", "node-1", 4), make_run("big", make_pod_set(1, 8), since=NOW - 1000)
    small, state = make_run("small", make_pod_set(1, 4)), QueueState()
    for seconds, starts, keeps in ((0, False, True), (999, False, True), (1000, True, False)):
        found = admit_runs([held, big, small], Capacity(NODE), KEEPS, state, NOW + seconds)
        state = found.state
        assert (found.verdicts["small"].admitted, state.reservation is not None) == (starts, keeps)
    for seconds, keeps in ((1999, False), (2000, True)):
        state = admit_runs([held, big], Capacity(NODE), KEEPS, state, NOW + seconds).state
        assert (state.reservation is not None) is keeps


@pytest.mark.parametrize(("priority", "starts"), [(0, False), (1, False), (2, True)])
def test_displaced_run_blocks_later_runs_of_its_priority(priority: int, starts: bool) -> None:
    gang = make_pod_set(2, 8)
    lost = replace(make_holder("a", "node-1", 8, priority=1), gang=(gang,))
    rooms = (make_room("node-1"), make_room("node-2", others=4))
    later = make_run("later", make_pod_set(1, 4), priority=priority)
    found = make_plan(lost, later, rooms=rooms, rules=KEEPS, state=QueueState(lacking={"a": NOW - 1}))
    assert found.verdicts["later"].admitted is starts
    if not starts:
        assert "pods of runs that were admitted before have no nodes yet" in found.verdicts["later"].message


def test_default_queue_times_match_the_page() -> None:
    rules = QueueRules()
    assert (rules.half_life_seconds, rules.protect_seconds, rules.displaced_seconds) == (6 * 3600, 600, 60)
    assert GPU not in rules.weights
