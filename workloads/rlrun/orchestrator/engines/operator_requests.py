"""Requests of the operator about a run's engines, received with the answers to the Lease's renewals."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass

from rlrun.protocol.messages import annotations as names
from rlrun.protocol.messages.spot_wish import SpotWish


@dataclass
class Wishes:
    """Current requests of the operator to a run."""

    engines: int | None = None
    """Number of engines to keep in use. None: no request."""
    spot: SpotWish | None = None
    """Number of these engines on interruptible nodes, and their hosts. None: no engine is on such a node."""
    window_seconds: float | None = None
    """Seconds that a load report must cover."""

    def take(self, lease: str) -> None:
        """Read the requests from a Lease. An unreadable Lease changes nothing."""
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
