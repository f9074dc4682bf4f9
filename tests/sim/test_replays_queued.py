"""Regression histories of an operator with a queue."""

from __future__ import annotations

import pytest

from tests.sim.history import Step, replay

HISTORIES: dict[str, tuple[int, list[Step]]] = {
    "a trainer that was made unheard, and its room is taken back before that is seen": (
        2430,
        [
            ("workload made unheard", 6, 5),
            ("calm", 8, 11),
            ("another run is first", 7, 4),
            ("operator dies", 10, 4),
        ],
    ),
    "a trainer that was made unheard, and a specification that cannot be run meanwhile": (
        3737,
        [
            ("workload made unheard", 3, 5),
            ("operate", 10, 10),
            ("spec edited", 3, 8),
            ("API fault", 5, 0),
            ("calm", 3, 3),
        ],
    ),
    "an orchestrator that is refused until the room of its run is taken back": (
        3899,
        [
            ("operate", 11, 2),
            ("another run is first", 11, 4),
            ("calm", 11, 9),
            ("workload made unheard", 5, 8),
            ("another run is first", 4, 3),
            ("refused", 11, 8),
            ("time", 4, 10),
            ("calm", 11, 10),
        ],
    ),
    "engines that are refused until the room of their run is taken back": (
        1887,
        [
            ("refused", 2, 0),
            ("calm", 6, 4),
            ("another run is first", 2, 10),
            ("calm", 11, 10),
            ("others hold room", 5, 5),
            ("calm", 10, 4),
            ("time", 5, 8),
            ("calm", 3, 6),
        ],
    ),
    "a pod of somebody else has the trainer's name, and the queue tries again each minute": (
        6095,
        [
            ("others hold room", 0, 7),
            ("calm", 7, 0),
            ("name taken", 1, 0),
            ("calm", 8, 1),
            ("calm", 8, 9),
            ("calm", 0, 5),
            ("calm", 11, 1),
            ("calm", 2, 5),
            ("others hold room", 8, 5),
            ("calm", 6, 4),
            ("calm", 6, 11),
            ("long wait", 4, 1),
        ],
    ),
    "a former leader has put it back to Suspending by what it had not heard, and its turn has come in the plan of before": (
        587,
        [
            ("operate", 9, 11),
            ("second operator", 0, 8),
            ("another run is first", 1, 2),
            ("calm", 11, 9),
            ("others hold room", 11, 0),
            ("second operator works", 11, 0),
            ("leader replaced", 6, 11),
        ],
    ),
}


@pytest.mark.parametrize("name", HISTORIES)
def test_queued_run_starts_and_explains_its_wait(name: str) -> None:
    seed, steps = HISTORIES[name]
    assert replay(steps, seed, queued=True).status["phase"] == "Running"
