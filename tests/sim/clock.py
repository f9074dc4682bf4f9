"""The cluster's time, and the operator's."""

from __future__ import annotations


class Clock:
    """The cluster's time, and the operator's: its wall clock may be set, its other one only advances."""

    def __init__(self, now: float) -> None:
        self._now = now
        self._ahead = 0.0
        self._steady = 1000.0
        self.was_set = False
        """Somebody has set the operator's wall clock: it is not that of the cluster."""

    def now(self) -> float:
        return self._now

    def wall(self) -> float:
        return self._now + self._ahead

    def steady(self) -> float:
        return self._steady

    def pass_(self, seconds: float) -> None:
        self._now += seconds
        self._steady += seconds

    def set_forward(self, seconds: float) -> None:
        """Somebody sets the operator's wall clock."""
        self._ahead += seconds
        self.was_set = True
