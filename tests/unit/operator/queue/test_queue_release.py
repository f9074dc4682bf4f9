"""Release of admitted runs whose pods get no nodes, and their retries."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rlrun_operator.queue.admit import admit_runs
from rlrun_operator.queue.queue_model import Applicant, Capacity, Plan, QueueState
from tests.unit.operator.queue.test_queue_core import (
    NOW,
    RULES,
    make_holder,
    make_plan,
    make_pod_set,
    make_room,
    make_run,
)

FULL = (make_room("node-1"), make_room("node-2"))


def make_half_placed_run(name: str, on: str, **more: Any) -> Applicant:
    """Run with two pods, one of them on a node."""
    return replace(make_holder(name, on, 8, **more), gang=(make_pod_set(2, 8),))


def list_released(found: Plan) -> list[str]:
    return [uid for uid, verdict in found.verdicts.items() if verdict.reason == "Released"]


@pytest.mark.parametrize(("room_is_free", "seconds"), [(True, 600.0), (False, 60.0)])
def test_run_is_released_sooner_if_no_room_is_free(room_is_free: bool, seconds: float) -> None:
    rooms = (make_room("node-1"), make_room("node-2", others=0 if room_is_free else 1))
    for waited, expected in ((seconds - 1, []), (seconds, ["a"])):
        assert (
            list_released(
                make_plan(
                    make_half_placed_run("a", "node-1"), rooms=rooms, state=QueueState(lacking={"a": NOW - waited})
                )
            )
            == expected
        )


@pytest.mark.parametrize(
    ("first", "last"),
    [({"priority": 1, "started": 9.0}, {"started": 1.0}), ({"started": 1.0}, {"started": 9.0})],
    ids=["priority", "start"],
)
def test_release_takes_one_run_with_the_lowest_rank(first: dict[str, float], last: dict[str, float]) -> None:
    runs = make_half_placed_run("a", "node-1", **first), make_half_placed_run("b", "node-2", **last)
    late = QueueState(lacking={"a": NOW - 5000, "b": NOW - 5000})
    found = make_plan(*runs, rooms=FULL, state=late)
    assert list_released(found) == ["b"]
    next_pass = admit_runs([runs[0], replace(runs[1], stage="leaving")], Capacity(FULL), RULES, found.state, NOW + 1)
    assert list_released(next_pass) == [], "the other run first gets the time to use what was released"


def test_retry_delay_doubles_up_to_ten_minutes() -> None:
    waits = []
    for count in range(7):
        state = QueueState(lacking={"a": NOW - 601}, tries={"a": (count, 0.0)})
        found = make_plan(make_half_placed_run("a", "node-1"), rooms=FULL[:1], state=state).state.tries["a"]
        assert found[0] == count + 1
        waits.append(found[1] - NOW)
    assert waits == [30, 60, 120, 240, 480, 600, 600]


def test_released_run_is_not_retried_before_its_time() -> None:
    waits, state = make_run("a", make_pod_set(1, 8)), QueueState(tries={"a": (1, NOW + 30)})
    before = admit_runs([waits], Capacity(FULL), RULES, state, NOW + 29)
    assert before.verdicts["a"].reason == "BackingOff"
    assert admit_runs([waits], Capacity(FULL), RULES, before.state, NOW + 30).verdicts["a"].admitted
