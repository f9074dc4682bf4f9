"""Clocks of the cluster and the operator."""

from __future__ import annotations


class Clock:
    """Clocks of the cluster and the operator: the operator's wall clock can be set, its steady clock only advances."""

    def __init__(self, now: float) -> None:
        self._now = now
        self._ahead = 0.0
        self._steady = 1000.0
        self.was_set = False
        """Whether the operator's wall clock was set, so that it differs from that of the cluster."""

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
        """Set the operator's wall clock forward."""
        self._ahead += seconds
        self.was_set = True
