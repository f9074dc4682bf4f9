"""Memory that the passes over one run leave for the next, which no object in the cluster keeps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from rlrun_operator.state import Manifest, Refusal, TeamDefaults, Ungrown


class NameConflict(NamedTuple):
    """A foreign object that has a child's name.

    Attributes:
        wanted: the state of the run that needs the name: another one may do without.
        child: the child.
        until: when it is looked at again (steady clock).
    """

    wanted: tuple[object, ...]
    child: Manifest
    until: float


@dataclass
class RunMemory:
    """Memory that the passes over one run leave for the next."""

    rejection: tuple[tuple[object, ...], str] | None = None
    """Edition of the run, and message: what the API server refused."""
    taken: NameConflict | None = None
    written_at: float = float("-inf")
    """Time of the last write of the status (steady clock)."""
    kept_out: tuple[Refusal, ...] = ()
    """Writes that the last try was not let in with."""
    tries: int = 0
    """Tries in a row in which something else than a quota kept an object out."""
    lost_key: tuple[str, str] | None = None
    """UID of the run, and the Secret with its key that was not there."""
    access: str | None = None
    """See `Observed`."""
    repaired_at: float = float("-inf")
    """Time at which a part was asked to be put right last (steady clock)."""
    asked_at: float = float("-inf")
    """Time at which the Lease was read because it had not been heard of for long (steady clock)."""
    ungrown: Ungrown | None = None
    """The last growth of the claim, if it was refused."""
    ungrown_until: float = float("-inf")
    """Time until which that is believed (steady clock)."""
    growths_refused: int = 0
    """Number of refusals in a row."""
    sent: tuple[Manifest, Manifest] | None = None
    """The status written last, and what the API server made of it (another version of the CRD drops and defaults fields)."""


def spec_edition(metadata: Manifest, defaults: TeamDefaults | None) -> tuple[object, ...]:
    """Sources that children are rendered from: the run's specification, and its namespace's defaults."""
    return metadata["uid"], metadata.get("generation", 0), defaults.mark if defaults is not None else None


def desired_of(run: Manifest) -> tuple[object, ...]:
    """State of a run that decides which names it needs."""
    metadata, status = run["metadata"], run.get("status") or {}
    return metadata["uid"], metadata.get("generation", 0), status.get("attempt")
