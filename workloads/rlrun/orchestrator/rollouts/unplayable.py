"""Unplayable tasks, and their share above which the run stops. Pure.

A row whose prompt is too long, is refused by the chat template or has no usable ground truth fails in the same way each
time. The first rollout decides it. It is not a sign of a faulty environment or engine, so the error budget does not
count it.
"""

from __future__ import annotations

from collections import Counter, deque

from rlrun.environments.episode import EpisodeError
from rlrun.orchestrator.rollouts.conversation import UnplayablePromptError

WINDOW_GROUPS = 100
"""Number of latest groups of an environment whose share is limited; smaller for an environment with fewer training
tasks.
"""
MAX_RATIO = 0.5
"""Limit of the share of unplayable tasks in these groups; a higher share has another cause than single rows."""


def unplayable_reason(error: Exception) -> str | None:
    """Return the reason why each rollout of a task meets this error, such as `too_long`, or None if another try may
    succeed.
    """
    if isinstance(error, UnplayablePromptError):
        return error.reason
    return "row" if isinstance(error, EpisodeError) and error.kind == "task" else None


class UnplayableTasks:
    """Unplayable tasks of all environments found in this attempt.

    Args:
        sizes: number of training tasks by the environment's label.
    """

    def __init__(self, sizes: dict[str, int]) -> None:
        self._found: dict[tuple[str, int], str] = {}
        self._windows = {label: deque[str | None](maxlen=min(WINDOW_GROUPS, size)) for label, size in sizes.items()}

    def reason(self, label: str, task: int) -> str | None:
        """Return the reason why a task is unplayable, such as `too_long`, or None if no rollout of it was refused."""
        return self._found.get((label, task))

    def add(self, label: str, task: int, reason: str) -> bool:
        """Record an unplayable task and return whether it is new. A group reports its task once per rollout."""
        is_new = (label, task) not in self._found
        self._found.setdefault((label, task), reason)
        return is_new

    def record(self, label: str, reason: str | None, message: str = "") -> str | None:
        """Count the outcome of a group.

        Args:
            label: label of its environment.
            reason: reason why its task is unplayable, or None if it was played.
            message: error of the task.

        Returns:
            Message for the user if too many tasks are unplayable, otherwise None. The missing groups of an incomplete
            window count as played.
        """
        window = self._windows[label]
        window.append(reason)
        reasons = Counter(found for found in window if found is not None)
        if reason is None or window.maxlen is None or reasons.total() <= MAX_RATIO * window.maxlen:
            return None
        counts = ", ".join(f"{name}: {count}" for name, count in reasons.most_common())
        return (
            f"{reasons.total()} of the last {len(window)} groups of environment {label!r} have unplayable tasks ({counts}; "
            f"the limit is {MAX_RATIO:.0%} of {window.maxlen}); increase seqLen for prompts that are too long, and correct or remove "
            f"the other rows. The latest: {message}"
        )
