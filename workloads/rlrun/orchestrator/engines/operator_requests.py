"""Requests of the operator about a run's engines, in the answers to the Lease's renewals."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass

from rlrun.protocol.messages import annotations as names
from rlrun.protocol.messages.spot_wish import SpotWish


@dataclass
class Wishes:
    """Requests of the operator to a run, in the answers to the Lease's renewals."""

    engines: int | None = None
    """Number of engines to leave in use; None: it asks for nothing."""
    spot: SpotWish | None = None
    """Engines of these on interruptible nodes; None: no engine is."""
    window_seconds: float | None = None
    """Seconds that a report of their load is to cover."""

    def take(self, lease: str) -> None:
        """Read an answer; what cannot be read leaves all as it was."""
        try:
            found = json.loads(lease)["metadata"].get("annotations") or {}
            engines = int(found[names.ENGINES_WANTED]) if names.ENGINES_WANTED in found else None
            window = float(found[names.ENGINES_WINDOW]) if names.ENGINES_WINDOW in found else None
            spot = SpotWish.read(found[names.ENGINES_SPOT]) if names.ENGINES_SPOT in found else None
        except (ValueError, LookupError, TypeError, AttributeError):
            return
        self.engines = None if engines is None or engines < 1 else engines
        self.spot = spot
        self.window_seconds = window if window is not None and math.isfinite(window) and window >= 0 else None
