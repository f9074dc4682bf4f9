"""Rules about what the status says of a wait."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rlrun_operator.names import attempt_of
from rlrun_operator.status import reasons
from tests.sim.invariants.common import TERMINAL, derived, is_of_the_run
from tests.sim.surroundings import NAME

if TYPE_CHECKING:
    from tests.sim.world import World


def told_truly(world: World, said: Sequence[str] = ()) -> str | None:
    """Complaint about the words of a status after a long wait in which nothing changed; `said`: messages shortly before."""
    if world.memory.edited or world.run is None or derived(world.status) in TERMINAL:
        return None
    return over(world) or unnamed(world, said) or unrecorded(world)


def over(world: World) -> str | None:
    """What is over and is told as if it were not."""
    said = [world.status.get("message") or "", *(c["message"] for c in world.status.get("conditions", ()))]
    old = sorted(mark for mark in world.lifted for message in said if mark in message)
    return f"told_truly: {old[0]} is over: {next(m for m in said if old[0] in m)}" if old else None


def unnamed(world: World, said: Sequence[str] = ()) -> str | None:
    """What alone keeps the run waiting and is not told."""
    status, cluster = world.status, world.cluster
    if derived(status) not in ("Pending", "Starting") and not _is_restarting_for_long(world):
        return None
    unbound = not cluster.binds and world.api.get("PersistentVolumeClaim", f"{NAME}-data") is not None
    present = [refusal.mark for refusal in world.api.refusals] + ([cluster.pool] if unbound else [])
    names = [name for _, name in world.foreign]
    quiet = (
        cluster.schedules
        and cluster.starts
        and cluster.room is None
        and not (
            cluster.down
            or cluster.lingering
            or cluster.idle
            or cluster.uncollected
            or world.memory.damaged
            or world.late
            or world.misses
        )
    )
    message = str(status.get("message"))
    if status.get("reason") == reasons.INVALID_CONFIGURATION:  # the first word is for it; conditions tell of the rest
        message = " ".join(str(condition["message"]) for condition in status.get("conditions", ()))
    told = " ".join((*said, message))
    if not quiet or not (present or names) or any(word in told for word in (*present, *names)):
        return None
    return f"told_truly: {[*present, *names]} keep the run waiting; it says {status.get('reason')}: {message}"


def unrecorded(world: World) -> str | None:
    """An attempt that trains and is not on record: nobody acts on what becomes of it."""
    orchestrator = world.cluster.training()
    if orchestrator is None or world.late is not None or not is_of_the_run(world, orchestrator):
        return None
    trains, known = attempt_of(orchestrator["metadata"]), world.status.get("attempt", 0)
    return None if trains == known else f"told_truly: attempt {trains} trains, and attempt {known} is on record"


def _is_restarting_for_long(world: World) -> bool:
    """Whether the next attempt is due, and does not begin."""
    waits = world.reason(reasons.RESTARTING)
    return derived(world.status) == "Restarting" and waits != reasons.BACK_OFF
