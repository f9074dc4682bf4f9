"""The run's volume: what its roles have written outlives all of them."""

from __future__ import annotations

CHECKPOINT_EVERY = 5
"""Steps."""


class Volume:
    """What the roles have written: it outlives all of them."""

    def __init__(self) -> None:
        self.attempts: dict[int, str] = {}
        """Attempts that have begun, each with the trainer pod that began it."""
        self.complete = 0
        """Step of the newest complete checkpoint."""
        self.begun_at: dict[int, int] = {}
        """Attempt -> step that it resumed from."""
        self.step: dict[int, int] = {}
        """Attempt -> the last step that it has trained."""

    def claim(self, attempt: int, pod: str) -> int | None:
        """Begin an attempt, with O_EXCL; returns the next free number if it has begun before."""
        if attempt in self.attempts:
            return max(self.attempts) + 1
        self.attempts[attempt] = pod
        self.begun_at[attempt] = self.step[attempt] = self.complete
        return None
