"""Counter of progress toward the next step. A stall is detected from the count only."""

from __future__ import annotations


class Activity:
    """Progress counter of an attempt.

    Within a step each mark counts only if it is higher than ever before. A step therefore has a bounded number of
    moves, and repeated work (filtered rollouts, engines that come and go) does not count.
    """

    def __init__(self) -> None:
        self.count = 0
        self._step: int | None = None
        self._best: dict[str, int] = {}

    def update(self, step: int, **marks: int | None) -> int:
        """Update the counter with the marks of the step after `step`, and return it. None: unknown mark."""
        if step != self._step:
            self._step, self._best = step, {}
            self.count += 1
        for name, value in marks.items():
            if value is not None and value > self._best.get(name, -1):
                self._best[name] = value
                self.count += 1
        return self.count
