"""Times of the last renewal of a run's Lease and of its last progress, by this operator's own clock and watch.

A renewal proves that the orchestrator is alive. Only a new attempt, step or activity proves progress of the run. Time in which the
operator could not observe the run counts for neither: after an outage, and after a gap between two renewals, the clock restarts.
"""

from __future__ import annotations

from dataclasses import dataclass

from rlrun.protocol.messages import annotations as keys
from rlrun_operator.state import Manifest
from rlrun_operator.status.progress import HEARTBEAT_SECONDS


@dataclass(frozen=True)
class Pulse:
    """Times of one Lease, in seconds since the epoch."""

    renewed_at: float
    moved_at: float


def record_beat(before: Pulse | None, known: Manifest | None, lease: Manifest, now: float) -> Pulse:
    """Return the pulse after `lease` was observed.

    Args:
        before: previous pulse; None: first observation of a Lease of this name.
        known: previous state of the Lease.
        lease: current state of the Lease.
        now: seconds since the epoch.
    """
    if before is None or known is None:
        return Pulse(now, now)
    renewed, moved = _renewal_time(known) != _renewal_time(lease), _lease_marks(known) != _lease_marks(lease)
    unseen = renewed and now - before.renewed_at > HEARTBEAT_SECONDS
    return Pulse(now if renewed else before.renewed_at, now if moved or unseen else before.moved_at)


def _renewal_time(lease: Manifest) -> object:
    spec = lease.get("spec") or {}
    return spec.get("renewTime"), spec.get("holderIdentity")


def _lease_marks(lease: Manifest) -> object:
    found = lease["metadata"].get("annotations") or {}
    return tuple(found.get(key) for key in (keys.ATTEMPT, keys.STEP, keys.ACTIVITY))
