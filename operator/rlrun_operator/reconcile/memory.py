"""Memory of the passes over one run: facts for the next pass that no object in the cluster contains."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from rlrun_operator.state import Manifest, Refusal, RefusalKind, TeamDefaults


@dataclass(frozen=True)
class Remembered:
    """Refusals of one kind, with the conditions under which they are still valid."""

    refusals: tuple[Refusal, ...]
    facts: tuple[object, ...] = ()
    """Facts of the run at the refusal (`relevant_facts`): other facts end it."""
    until: float = math.inf
    """End of its validity (steady clock)."""
    tries: int = 0
    """Number of refused attempts in a row, for the backoff."""
    child: Manifest | None = None
    """Child whose name a foreign object has."""


@dataclass
class RunMemory:
    """Memory of the passes over one run."""

    refusals: dict[RefusalKind, Remembered] = field(default_factory=dict)
    """Refused writes of earlier passes. A new refusal replaces the earlier one of its kind."""
    access: str | None = None
    """See `Observed`."""
    repaired_at: float = -math.inf
    """Time of the last repair of a part (steady clock)."""
    asked_at: float = -math.inf
    """Time of the last read of a silent Lease (steady clock)."""
    written_at: float = -math.inf
    """Time of the last write of the status (steady clock)."""
    sent: tuple[Manifest, Manifest] | None = None
    """The status written last, and the status that the API server stored: another version of the CRD drops and defaults fields."""

    def valid_refusals(self, run: Manifest, defaults: TeamDefaults | None, clock: float) -> Iterator[Refusal]:
        """Return the refusals that still hold for the current state of the run."""
        for kind, known in self.refusals.items():
            if known.facts == relevant_facts(kind, run, defaults) and clock < known.until:
                yield from known.refusals

    def refusals_of(self, kind: RefusalKind) -> tuple[Refusal, ...]:
        """Return the refusals of a kind, valid or not."""
        known = self.refusals.get(kind)
        return known.refusals if known is not None else ()


def relevant_facts(kind: RefusalKind, run: Manifest, defaults: TeamDefaults | None) -> tuple[object, ...]:
    """Return the facts of a run that a refusal depends on.

    An invalid child depends on the sources of its manifest: the specification and the namespace's defaults. A taken name depends on the
    attempt too, because another attempt may not need the name. A lost key belongs to the run's UID.
    """
    metadata = run["metadata"]
    if kind == "invalid":
        return metadata["uid"], metadata.get("generation", 0), defaults.mark if defaults is not None else None
    if kind == "name-taken":
        return metadata["uid"], metadata.get("generation", 0), (run.get("status") or {}).get("attempt")
    return (metadata["uid"],) if kind == "key-lost" else ()
