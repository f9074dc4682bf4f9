"""The places at which all ranks agree whether to stop."""

from __future__ import annotations

from rlrun.trainer.ranks.group import Group
from rlrun.trainer.ranks.stop import Stop, StopAgreed


class Agreement:
    """One rank's part in the agreement.

    Args:
        group: all ranks.
        stop: what this rank was asked.
    """

    def __init__(self, group: Group, stop: Stop) -> None:
        self._group, self.stop = group, stop
        self.place = 0
        """Places passed so far; the same on all ranks."""

    def meet(self) -> None:
        """Pass a place; all ranks call this together.

        No rank ever leaves on its own: the others would wait for it in their next collective.

        Raises:
            StopAgreed: on all ranks, as soon as one was asked to stop.
        """
        self.place += 1
        asked = self._group.maxima({"stop": float(self.stop.asked), "signal": float(self.stop.number or 0)})
        if asked["stop"]:
            self.stop.join(int(asked["signal"]) or None)
            raise StopAgreed
