"""The run's volume, whose content outlives its roles."""

from __future__ import annotations

CHECKPOINT_EVERY = 5
"""Interval of checkpoints in steps."""


class Volume:
    """Files of the roles, which outlive all of them."""

    def __init__(self) -> None:
        self.attempts: dict[int, str] = {}
        """Started attempts, each with its trainer pod."""
        self.complete = 0
        """Step of the newest complete checkpoint."""
        self.begun_at: dict[int, int] = {}
        """Attempt -> step of its resume."""
        self.step: dict[int, int] = {}
        """Attempt -> its last trained step."""

    def claim(self, attempt: int, pod: str) -> int | None:
        """Start an attempt with O_EXCL; return the next free number if it was started before."""
        if attempt in self.attempts:
            return max(self.attempts) + 1
        self.attempts[attempt] = pod
        self.begun_at[attempt] = self.step[attempt] = self.complete
        return None
