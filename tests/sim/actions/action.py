"""One kind of event."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from tests.sim.world import World


class Action(NamedTuple):
    """One kind of event.

    Attributes:
        do: given the world and two numbers below 12.
        weight: how often, beside the others.
        always: in every history; others are in half of them.
    """

    do: Callable[[World, int, int], None]
    weight: int
    always: bool = False
