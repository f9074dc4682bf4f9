"""Release of admitted runs whose pods get no nodes, and their next tries."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rlrun_operator.queue.admit import admit_runs
from rlrun_operator.queue.queue_model import Applicant, Capacity, Plan, QueueState
from tests.unit.operator.queue.test_queue_core import NOW, RULES, holds, plan, pods, room, run

FULL = (room("node-1"), room("node-2"))


def half(name: str, on: str, **more: Any) -> Applicant:
    """A run of two pods, one of which has a node."""
    return replace(holds(name, on, 8, **more), gang=(pods(2, 8),))


def released(found: Plan) -> list[str]:
    return [uid for uid, verdict in found.verdicts.items() if verdict.reason == "Released"]


@pytest.mark.parametrize(("room_is_free", "seconds"), [(True, 600.0), (False, 60.0)])
def test_run_gives_its_room_back_after_start_seconds_or_a_minute_without_any_room(
    room_is_free: bool, seconds: float
) -> None:
    rooms = (room("node-1"), room("node-2", others=0 if room_is_free else 1))
    for waited, expected in ((seconds - 1, []), (seconds, ["a"])):
        assert (
            released(plan(half("a", "node-1"), rooms=rooms, state=QueueState(lacking={"a": NOW - waited}))) == expected
        )


@pytest.mark.parametrize(
    ("first", "last"),
    [({"priority": 1, "started": 9.0}, {"started": 1.0}), ({"started": 1.0}, {"started": 9.0})],
    ids=["priority", "start"],
)
def test_release_takes_one_run_at_a_time_and_the_last_in_rank_first(
    first: dict[str, float], last: dict[str, float]
) -> None:
    runs = half("a", "node-1", **first), half("b", "node-2", **last)
    late = QueueState(lacking={"a": NOW - 5000, "b": NOW - 5000})
    found = plan(*runs, rooms=FULL, state=late)
    assert released(found) == ["b"]
    next_pass = admit_runs([runs[0], replace(runs[1], stage="leaving")], Capacity(FULL), RULES, found.state, NOW + 1)
    assert released(next_pass) == [], "the other run first gets the time to use what was released"


def test_retries_wait_twice_as_long_each_time_up_to_ten_minutes() -> None:
    waits = []
    for count in range(7):
        state = QueueState(lacking={"a": NOW - 601}, tries={"a": (count, 0.0)})
        found = plan(half("a", "node-1"), rooms=FULL[:1], state=state).state.tries["a"]
        assert found[0] == count + 1
        waits.append(found[1] - NOW)
    assert waits == [30, 60, 120, 240, 480, 600, 600]


def test_released_run_is_not_tried_before_its_time() -> None:
    waits, state = run("a", pods(1, 8)), QueueState(tries={"a": (1, NOW + 30)})
    before = admit_runs([waits], Capacity(FULL), RULES, state, NOW + 29)
    assert before.verdicts["a"].reason == "BackingOff"
    assert admit_runs([waits], Capacity(FULL), RULES, before.state, NOW + 30).verdicts["a"].admitted
