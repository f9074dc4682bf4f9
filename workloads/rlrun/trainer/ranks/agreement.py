"""Points at which all ranks agree whether to stop."""

from __future__ import annotations

from rlrun.trainer.ranks.group import Group
from rlrun.trainer.ranks.stop import Stop, StopAgreed


class Agreement:
    """Stop agreement on one rank.

    Args:
        group: all ranks.
        stop: stop requests of this rank.
    """

    def __init__(self, group: Group, stop: Stop) -> None:
        self._group, self.stop = group, stop
        self.place = 0
        """Number of passed points; the same on all ranks."""

    def meet(self) -> None:
        """Pass a point; all ranks call it together.

        A rank never leaves alone, because the others would wait for it in their next collective.

        Raises:
            StopAgreed: at least one rank has a request to stop; raised on all ranks.
        """
        self.place += 1
        asked = self._group.maxima({"stop": float(self.stop.asked), "signal": float(self.stop.number or 0)})
        if asked["stop"]:
            self.stop.join(int(asked["signal"]) or None)
            raise StopAgreed
