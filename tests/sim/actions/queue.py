"""Events of the queue: other runs have the room, or want this run's room."""

from __future__ import annotations

from tests.sim.actions.action import Action
from tests.sim.world import World


def _others_hold(world: World, a: int, b: int) -> None:
    world.others_want(hold=a % 3 == 0, take=False)


def _another_is_first(world: World, a: int, b: int) -> None:
    """Another run takes this run's room until it ends."""
    world.others_want(hold=False, take=a % 4 != 0)


QUEUE: dict[str, Action] = {
    "others hold room": Action(_others_hold, 2, always=True),
    "another run is first": Action(_another_is_first, 3, always=True),
}
