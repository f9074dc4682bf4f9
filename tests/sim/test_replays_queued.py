"""Histories of an operator with a queue that once went wrong."""

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
}


@pytest.mark.parametrize("name", HISTORIES)
def test_nothing_begins_before_its_admission_is_on_record(name: str) -> None:
    seed, steps = HISTORIES[name]
    assert replay(steps, seed, queued=True).status["phase"] == "Running"
