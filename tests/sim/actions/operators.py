"""Events around operators: another release, two at a time, and watches that repeat the past."""

from __future__ import annotations

from tests.sim.actions.action import Action
from tests.sim.world import World


def _other_release(world: World, a: int, b: int) -> None:
    """An upgrade, or the way back: where nothing else happens, what runs is not written to."""
    world.hear()
    world.operate(a + b)
    world.restart_operator(release=1 - world.operator.release)


def _leader_late(world: World, a: int, b: int) -> None:
    """Another process leads while the last request of the one before is still on its way."""
    world.operate(1 + a + b)
    world.replace_operator(release=a % 2)


def _late_request(world: World, a: int, b: int) -> None:
    world.late_request()


def _past_again(world: World, a: int, b: int) -> None:
    """A watch begins at an old version: it brings what it has brought before, deletions included."""
    world.hear_the_past(1 + a + b)


def _second(world: World, a: int, b: int) -> None:
    """Two operators watch the same namespace, for a time."""
    if world.rival is None or b % 3:
        world.start_rival(a % 2)
    else:
        world.end_rival()


def _second_works(world: World, a: int, b: int) -> None:
    world.rival_operates(1 + 3 * a, 4 * b)


OPERATORS: dict[str, Action] = {
    "other release": Action(_other_release, 2),
    "leader replaced": Action(_leader_late, 2),
    "late request": Action(_late_request, 3),
    "second operator": Action(_second, 1),
    "second operator works": Action(_second_works, 4),
    "past again": Action(_past_again, 2),
}
