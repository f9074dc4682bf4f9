"""Order of the queue: priority, share of the namespace, arrival, and repeated releases."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rlrun_operator.queue.admit import admit_runs
from rlrun_operator.queue.queue_model import (
    Applicant,
    Capacity,
    HeldPod,
    PodSet,
    QueueRules,
    QueueState,
    Reservation,
    Room,
)
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

FULL = make_holder("x", "node-1", 8, namespace="team-x")
KEEPS = replace(RULES, preemption="Never")


def list_queue_order(*runs: Applicant, rules: QueueRules = KEEPS, state: QueueState | None = None) -> list[str]:
    """Names of the runs that wait for the only node, in queue order."""
    found = make_plan(FULL, *runs, rooms=(make_room("node-1"),), rules=rules, state=state).verdicts
    waiting = {verdict.position: name for name, verdict in found.items() if verdict.position is not None}
    return [waiting[position] for position in sorted(waiting)]


def test_run_with_higher_priority_comes_first() -> None:
    assert list_queue_order(
        make_run("a", make_pod_set(1, 8), since=NOW - 9), make_run("b", make_pod_set(1, 8), priority=1)
    ) == ["b", "a"]


def test_runs_of_a_namespace_start_in_order_of_arrival() -> None:
    assert list_queue_order(
        make_run("a", make_pod_set(1, 8), since=NOW - 5), make_run("b", make_pod_set(1, 8), since=NOW - 9)
    ) == ["b", "a"]


def test_namespace_with_less_past_use_comes_first() -> None:
    early = make_run("a", make_pod_set(1, 8), since=NOW - 9)
    late = make_run("b", make_pod_set(1, 8), namespace="team-b")
    assert list_queue_order(early, late) == ["a", "b"]
    assert list_queue_order(early, late, state=QueueState(use={"team-a": 0.1})) == ["b", "a"]


def test_share_of_a_namespace_is_divided_by_its_weight() -> None:
    state = QueueState(use={"team-a": 0.3, "team-b": 0.2})
    runs = make_run("a", make_pod_set(1, 8)), make_run("b", make_pod_set(1, 8), namespace="team-b", since=NOW - 9)
    assert list_queue_order(*runs, state=state) == ["b", "a"]
    assert list_queue_order(*runs, state=state, rules=replace(KEEPS, weights={"team-a": 2.0})) == ["a", "b"]


def test_past_share_has_a_half_life_of_six_hours() -> None:
    state = QueueState(at=NOW - 6 * 3600, use={"team-a": 0.4})
    assert make_plan(rooms=(make_room("node-1"),), state=state).state.use["team-a"] == pytest.approx(0.2)


def test_admission_counts_in_the_share_of_the_next_choice() -> None:
    runs = [make_run(f"a-{i}", make_pod_set(1, 4), since=NOW - 9 + i) for i in range(2)]
    found = make_plan(
        *runs, make_run("b", make_pod_set(1, 4), namespace="team-b"), rooms=(make_room("node-1"),)
    ).verdicts
    assert [name for name, verdict in found.items() if verdict.admitted] == ["a-0", "b"]


def test_share_counts_devices_or_else_other_resources() -> None:
    rooms = (Room("node-1", {GPU: 8, "cpu": 96, "pods": 110}, {}, {"metadata": {"name": "node-1"}}),)

    def first(a: dict[str, float], b: dict[str, float], asks: dict[str, float]) -> str:
        """Namespace of the first waiting run if each namespace holds the given amount."""
        held = [
            make_run(team, PodSet("trainer", 1, amount), stage="holding", namespace=team)
            for team, amount in (("team-a", a), ("team-b", b))
        ]
        held = [replace(one, pods=(HeldPod("trainer", "node-1", one.gang[0].requests),)) for one in held]
        waits = [make_run(f"new-{team}", PodSet("trainer", 1, asks), namespace=team) for team in ("team-b", "team-a")]
        found = make_plan(*held, *waits, rooms=rooms, rules=KEEPS).verdicts
        return next(one.namespace for one in waits if found[one.uid].position == 1)

    assert first({GPU: 1, "cpu": 80}, {GPU: 2, "cpu": 1}, {GPU: 8}) == "team-a"
    assert first({"cpu": 80}, {"cpu": 8}, {"cpu": 90}) == "team-b"


def test_run_with_kept_room_is_first_of_its_priority() -> None:
    kept = QueueState(reservation=Reservation("big", {"node-1": {GPU: 8.0}}, NOW - 9, NOW + 1000))
    big, small = (
        make_run("big", make_pod_set(1, 8)),
        make_run("a", make_pod_set(1, 8), namespace="team-b", since=NOW - 9),
    )
    assert list_queue_order(big, small) == ["a", "big"]
    assert list_queue_order(big, small, state=kept) == ["big", "a"]
    assert list_queue_order(big, replace(small, priority=1), state=kept) == ["a", "big"]


@pytest.mark.parametrize(("releases", "expected"), [(2, ["high", "low"]), (3, ["low", "high"])])
def test_run_moves_to_the_end_after_three_releases(releases: int, expected: list[str]) -> None:
    state = QueueState(tries={"high": (releases, NOW - 1)})
    assert (
        list_queue_order(
            make_run("high", make_pod_set(1, 8), priority=10), make_run("low", make_pod_set(1, 8)), state=state
        )
        == expected
    )


def test_runs_at_the_end_alternate_regardless_of_priority() -> None:
    state = QueueState(tries={"high": (4, NOW - 1), "low": (3, NOW - 1)})
    assert list_queue_order(
        make_run("high", make_pod_set(1, 8), priority=10), make_run("low", make_pod_set(1, 8)), state=state
    ) == ["low", "high"]


def test_release_count_resets_once_all_pods_have_nodes() -> None:
    tries = QueueState(tries={"a": (2, NOW - 100)})
    lacks = make_run("a", make_pod_set(1, 8), stage="holding")
    assert make_plan(lacks, rooms=(make_room("node-1"),), state=tries).state.tries == tries.tries
    assert make_plan(make_holder("a", "node-1", 8), rooms=(make_room("node-1"),), state=tries).state.tries == {}


def test_run_that_never_fits_gets_no_reservation() -> None:
    runs = make_run("huge", make_pod_set(3, 8), since=NOW - 2000), make_run("big", make_pod_set(1, 8), since=NOW - 1000)
    kept = make_plan(FULL, *runs, rooms=(make_room("node-1"),), rules=KEEPS).state.reservation
    assert kept is not None
    assert kept.uid == "big"


def test_next_run_without_known_capacity_waits_for_placed_pods() -> None:
    first, next_one = make_run("a", make_pod_set(2, 8), stage="holding"), make_run("b", make_pod_set(1, 8))
    bound = HeldPod("trainer", "node-1", {GPU: 8})
    for placed, starts in (((bound,), False), ((bound, replace(bound, node=None)), False), ((bound, bound), True)):
        found = admit_runs([replace(first, pods=placed), next_one], None, RULES, QueueState(), NOW).verdicts
        assert found["b"].admitted is starts


def test_ending_pods_hold_their_room() -> None:
    ends = make_run("a", stage="leaving", pods=(HeldPod("trainer", "node-1", {GPU: 8}, ending=True),))
    assert not make_plan(ends, make_run("b", make_pod_set(1, 8)), rooms=(make_room("node-1"),)).verdicts["b"].admitted


def test_pods_are_packed_to_keep_whole_nodes_free() -> None:
    rooms = (make_room("node-1"), make_room("node-2", others=4))
    found = admit_runs(
        [make_run("a", make_pod_set(1, 4)), make_run("b", make_pod_set(1, 8), since=NOW + 1)],
        Capacity(rooms),
        RULES,
        QueueState(),
        NOW,
    )
    assert all(verdict.admitted for verdict in found.verdicts.values())
