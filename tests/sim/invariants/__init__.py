"""Invariants of every history. A rule returns a complaint or None; a new rule is one more function in the table of its
module.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.sim.invariants.common import derived
from tests.sim.invariants.fleet import FLEET, engines_at_rest
from tests.sim.invariants.memory import Memory
from tests.sim.invariants.requests import makes_workload, of_request
from tests.sim.invariants.rest import at_rest, of_writes
from tests.sim.invariants.sizes import SIZES
from tests.sim.invariants.states import STATES
from tests.sim.invariants.statuses import STEPS
from tests.sim.invariants.truth import told_truly

if TYPE_CHECKING:
    from tests.sim.world import World

__all__ = [
    "Memory",
    "at_rest",
    "derived",
    "engines_at_rest",
    "makes_workload",
    "of_request",
    "of_state",
    "of_writes",
    "told_truly",
]
Json = dict[str, Any]


def of_state(world: World) -> str | None:
    """Return the complaint of the first rule that the present state breaks."""
    for rule in STATES:
        if (problem := rule(world)) is not None:
            return f"{rule.__name__}: {problem}"
    memory, status = world.memory, world.status
    if not status or status is memory.status:
        return None
    old, memory.status = memory.status, status
    if memory.edited:
        if _is_edited(old, status):
            memory.status = old
            return None
        memory.edited = False
    for step in (*STEPS, *SIZES, *FLEET):
        if (problem := step(world, old, status)) is not None:
            return f"{step.__name__}: {problem}"
    return None


def _is_edited(old: Json, status: Json) -> bool:
    """Whether a part of a manual edit remains: later writes of the operator may cover some of it."""
    left = (
        status.get("message") == "edited" or status.get("reason") == "Edited" or status.get("phase") != derived(status)
    )
    return left or status.get("observedGeneration", 0) < old.get("observedGeneration", 0)
