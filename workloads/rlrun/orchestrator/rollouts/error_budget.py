"""Limit of failed rollouts above which the run stops. Pure."""

from __future__ import annotations

from collections import Counter, deque

WINDOW_ROLLOUTS = 100
DEATH_SHARE = 0.1
"""Upper bound of the share of the window for one ended environment process, at least one rollout. The end of a process
fails many rollouts but is one fault.
"""


class ErrorBudget:
    """Outcomes of the latest rollouts.

    Args:
        max_ratio: share of failed rollouts in the window above which the run fails; at 1.0, if all failed.
        batch_size: rollouts per step, the minimum of the window's size.
    """

    def __init__(self, max_ratio: float, batch_size: int) -> None:
        self._max_ratio = max_ratio
        self._size = max(WINDOW_ROLLOUTS, batch_size)
        self._window: deque[tuple[str, str | None]] = deque(maxlen=self._size)
        self._of_death: Counter[tuple[str, int]] = Counter()

    def record(self, environment: str, error: str | None = None, *, death: int = 0) -> str | None:
        """Count one rollout.

        Args:
            environment: name of its environment.
            error: error of the rollout, or None.
            death: number of the environment process's end that failed it; 0 for other causes.

        Returns:
            Message for the user if the limit is exceeded, otherwise None. The missing rollouts of an incomplete window
            count as successful.
        """
        if death:
            self._of_death[environment, death] += 1
            if self._of_death[environment, death] > max(1, int(DEATH_SHARE * self._size)):
                return None
        self._window.append((environment, error))
        if error is None:
            return None
        failed = [(name, text) for name, text in self._window if text is not None]
        if len(failed) <= self._max_ratio * self._size and len(failed) < self._size:
            return None
        worst, count = Counter(name for name, _ in failed).most_common(1)[0]
        first = next(text for name, text in failed if name == worst)
        return (
            f"{len(failed)} of the last {len(self._window)} rollouts ended in an error, {count} of them in environment {worst!r} "
            f"(orchestrator.maxErrorRatio is {self._max_ratio:g} of {self._size}). The first one: {first}"
        )
