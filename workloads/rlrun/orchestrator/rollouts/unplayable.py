"""Tasks that can never be played, and the share of them above which the run stops. Pure.

A row whose prompt is too long, that the chat template refuses or that has no usable ground truth fails in the same way each time. It is
decided once, with the first rollout, and says nothing about the environment's code or the engines: the budget of errors does not count it.
"""

from __future__ import annotations

from collections import Counter, deque

from rlrun.environments.episode import EpisodeError
from rlrun.orchestrator.rollouts.conversation import UnplayablePromptError

WINDOW_GROUPS = 100
"""Latest groups of an environment whose share is bounded; fewer for an environment with fewer training tasks."""
MAX_RATIO = 0.5
"""Largest share of these groups that may be of unplayable tasks; with more, something other than single rows is wrong."""


def unplayable_reason(error: Exception) -> str | None:
    """Return why each rollout of a task meets this error, such as `too_long`; None if another try may succeed."""
    if isinstance(error, UnplayablePromptError):
        return error.reason
    return "row" if isinstance(error, EpisodeError) and error.kind == "task" else None


class UnplayableTasks:
    """Unplayable tasks of all environments, as far as this attempt has found them.

    Args:
        sizes: number of training tasks by the environment's label.
    """

    def __init__(self, sizes: dict[str, int]) -> None:
        self._found: dict[tuple[str, int], str] = {}
        self._windows = {label: deque[str | None](maxlen=min(WINDOW_GROUPS, size)) for label, size in sizes.items()}

    def reason(self, label: str, task: int) -> str | None:
        """Why a task cannot be played, such as `too_long`; None if no rollout of it was refused."""
        return self._found.get((label, task))

    def add(self, label: str, task: int, reason: str) -> bool:
        """Remember an unplayable task. True if it was not known: a group finds it with each of its rollouts."""
        is_new = (label, task) not in self._found
        self._found.setdefault((label, task), reason)
        return is_new

    def record(self, label: str, reason: str | None, message: str = "") -> str | None:
        """Count the outcome of a group.

        Args:
            label: its environment.
            reason: why its task cannot be played; None: it was played.
            message: error of the task.

        Returns:
            Message for the user once too many are unplayable, else None. An incomplete window counts as if its other groups were played.
        """
        window = self._windows[label]
        window.append(reason)
        reasons = Counter(found for found in window if found is not None)
        if reason is None or window.maxlen is None or reasons.total() <= MAX_RATIO * window.maxlen:
            return None
        counts = ", ".join(f"{name}: {count}" for name, count in reasons.most_common())
        return (
            f"{reasons.total()} of the last {len(window)} groups of environment {label!r} are of unplayable tasks ({counts}; "
            f"the limit is {MAX_RATIO:.0%} of {window.maxlen}). Raise seqLen for prompts that are too long; correct or remove the other "
            f"rows. The latest: {message}"
        )
