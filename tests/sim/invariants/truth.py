"""Rules of reported waits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rlrun_operator.names import attempt_of
from rlrun_operator.status import reasons
from tests.sim.cluster.admission import SORTS
from tests.sim.invariants.common import TERMINAL, derived, is_of_the_run
from tests.sim.surroundings import NAME

if TYPE_CHECKING:
    from tests.sim.world import World

UNTRIED = "is created again when the specification is valid"
"""Message of waits whose specification is wrong, so that no object is created or refused."""


def told_truly(world: World, said: Sequence[str] = ()) -> str | None:
    """Return a complaint about the messages of a status after a long unchanged wait; `said` contains earlier messages."""
    if world.memory.edited or world.run is None or derived(world.status) in TERMINAL:
        return None
    complaints = (
        over(world),
        unnamed(world, said),
        not_made_again(world, said),
        unremoved(world, said),
        unrecorded(world),
    )
    return next(filter(None, complaints), None)


def over(world: World) -> str | None:
    """Return an ended wait that the status still reports."""
    said = [world.status.get("message") or "", *(c["message"] for c in world.status.get("conditions", ()))]
    old = sorted(mark for mark in world.lifted for message in said if mark in message)
    return f"told_truly: {old[0]} is over: {next(m for m in said if old[0] in m)}" if old else None


def unnamed(world: World, said: Sequence[str] = ()) -> str | None:
    """Return the only cause of a wait that the status does not report."""
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
    if (
        status.get("reason") == reasons.INVALID_CONFIGURATION
    ):  # it has priority in the message; conditions report the others
        message = " ".join(str(condition["message"]) for condition in status.get("conditions", ()))
    told = " ".join((*said, message))
    if not quiet or not (present or names) or any(word in told for word in (*present, *names, UNTRIED)):
        return None
    return f"told_truly: {[*present, *names]} keep the run waiting; it says {status.get('reason')}: {message}"


def not_made_again(world: World, said: Sequence[str] = ()) -> str | None:
    """Return a lost child of a running run that admission refuses and no condition reports."""
    if derived(world.status) not in ("Starting", "Running") or world.late is not None or world.foreign:
        return None
    kinds = {refusal.kind: refusal.mark for refusal in world.api.refusals}
    # Reading Secrets is forbidden: a lost one is detected when a pod waits for it and the operator checks.
    damaged = [(kind, name) for kind, name in world.memory.damaged if kind != "Secret" or _is_waited_for(world, name)]
    lost = [("Lease", f"{NAME}-progress"), ("Deployment", f"{NAME}-inference"), *damaged]
    gone = [ident for ident in lost if ident[0] in kinds and world.api.get(*ident) is None]
    told = " ".join((*said, *(str(condition["message"]) for condition in world.status.get("conditions", ()))))
    if not gone or UNTRIED in told or any(refusal.mark in told for refusal in world.api.refusals):
        return None
    return f"told_truly: {gone} are lost and refused ({kinds}), and no condition tells: {world.status.get('message')}"


def _is_waited_for(world: World, secret: str) -> bool:
    """Whether a container of the run cannot be created without a Secret."""
    lacks = f'secret "{secret}" not found'
    return any(lacks in str(pod["status"].get("containerStatuses")) for pod in world.api.all("Pod"))


def unremoved(world: World, said: Sequence[str] = ()) -> str | None:
    """Return a trainer that cannot be scaled down for a suspension and that the status does not report."""
    if derived(world.status) != "Suspending" or world.late is not None or world.foreign:
        return None
    marks = [each.mark for each in world.api.refusals if each.kind == "StatefulSet" and SORTS[each.sort].edits]
    wants = [one for one in world.api.all("StatefulSet") if is_of_the_run(world, one) and one["spec"]["replicas"]]
    # The message may be that of the queue, which takes the room back.
    told = " ".join((*said, *(str(condition["message"]) for condition in world.status.get("conditions", ()))))
    if not marks or not wants or any(mark in told for mark in marks):
        return None
    return f"told_truly: {marks} keep the trainer from its end; it says {world.status.get('message')}"


def unrecorded(world: World) -> str | None:
    """Return a training attempt that is not recorded, so that its failures have no effect."""
    orchestrator = world.cluster.training()
    if orchestrator is None or world.late is not None or not is_of_the_run(world, orchestrator):
        return None
    trains, known = attempt_of(orchestrator["metadata"]), world.status.get("attempt", 0)
    return None if trains == known else f"told_truly: attempt {trains} trains, and attempt {known} is on record"


def _is_restarting_for_long(world: World) -> bool:
    """Whether the next attempt is due but does not start."""
    waits = world.reason(reasons.RESTARTING)
    return derived(world.status) == "Restarting" and waits != reasons.BACK_OFF
