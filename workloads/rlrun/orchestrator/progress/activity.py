"""Counter of moves that bring a run nearer to its next step; a stall is detected from the count alone."""

from __future__ import annotations


class Activity:
    """The count of an attempt.

    Within a step each mark counts only when it is higher than ever before. So a step has a bounded number of moves, and what goes round in
    circles (rollouts that are filtered, engines that come and go) does not count.
    """

    def __init__(self) -> None:
        self.count = 0
        self._step: int | None = None
        self._best: dict[str, int] = {}

    def saw(self, step: int, **marks: int | None) -> int:
        """The count, after a look at the marks of the step after `step`; None: not known."""
        if step != self._step:
            self._step, self._best = step, {}
            self.count += 1
        for name, value in marks.items():
            if value is not None and value > self._best.get(name, -1):
                self._best[name] = value
                self.count += 1
        return self.count
