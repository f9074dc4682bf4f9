"""Events of operators: another release, two operators together, and watches that repeat events."""

from __future__ import annotations

from tests.sim.actions.action import Action
from tests.sim.world import World


def _other_release(world: World, a: int, b: int) -> None:
    """Upgrade or downgrade the operator: without other events, running objects must not be written."""
    world.hear()
    world.operate(a + b)
    world.restart_operator(release=1 - world.operator.release)


def _leader_late(world: World, a: int, b: int) -> None:
    """Make another process the leader while the last request of the previous one is in transit."""
    world.operate(1 + a + b)
    world.replace_operator(release=a % 2)


def _late_request(world: World, a: int, b: int) -> None:
    world.late_request()


def _past_again(world: World, a: int, b: int) -> None:
    """Restart a watch at an old version: it repeats earlier events, including deletions."""
    world.hear_the_past(1 + a + b)


def _second(world: World, a: int, b: int) -> None:
    """Let two operators watch the same namespace for some time."""
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
