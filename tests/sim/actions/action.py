"""One kind of event."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from tests.sim.world import World


class Action(NamedTuple):
    """One kind of event.

    Attributes:
        do: function of the world and two numbers below 12.
        weight: relative frequency.
        always: whether every history has it; other actions are in half of them.
    """

    do: Callable[[World, int, int], None]
    weight: int
    always: bool = False
