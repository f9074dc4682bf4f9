"""Facts shared by several rules."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from rlrun_operator.names import ROLE_LABEL, run_uid_of
from rlrun_operator.status import reasons
from rlrun_operator.status.conditions import run_phase
from tests.sim.cluster.pods import owners

if TYPE_CHECKING:
    from tests.sim.world import World

Json = dict[str, Any]
TERMINAL = ("Complete", "Failed")


class Said(NamedTuple):
    """Fields of a condition that determine the phase."""

    type: str
    status: str
    reason: str


def derived(status: Json) -> str:
    """Return the phase that follows from the conditions."""
    said = [Said(c["type"], c["status"], c["reason"]) for c in status.get("conditions", ())]
    return run_phase(said, status.get("attempt", 0))  # type: ignore[arg-type]


def may_go_on(status: Json) -> bool:
    """Whether an ended run may start again, because only its specification was wrong or forbidden."""
    failed = next((c for c in status.get("conditions", ()) if c["type"] == reasons.FAILED), {})
    return failed.get("reason") in (reasons.INVALID_CONFIGURATION, reasons.FORBIDDEN, *reasons.NEVER_STARTS)


def is_of_the_run(world: World, child: Json) -> bool:
    """Whether the child belongs to the present run of this name instead of a previous one."""
    if world.run is None:
        return False
    uid = world.run["metadata"]["uid"]
    return uid in owners(child) or run_uid_of(child["metadata"]) == uid


def is_group(pod: Json) -> bool:
    """Whether a pod belongs to an attempt."""
    return pod["metadata"]["labels"].get(ROLE_LABEL) in ("trainer", "orchestrator")
