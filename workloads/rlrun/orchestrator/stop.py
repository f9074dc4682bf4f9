"""SIGTERM and SIGINT in the role that feeds the trainer."""

from __future__ import annotations

from collections.abc import Callable

TERMINATED = 128 + 15
"""Exit code after SIGTERM or SIGINT, equal to the code of a process that SIGTERM killed."""


class Stop:
    """Reaction to signals.

    The first signal ends the data flow so that the trainer can complete its last checkpoint. Before the data flow
    exists, and from the second signal on, a signal cancels everything. This needs no cleanup, because each artifact is
    either complete or ignored.
    """

    def __init__(self) -> None:
        self.act: Callable[[], None] | None = None
        """Callback that ends the data flow. None before the data flow exists."""
        self._signals = 0

    def first(self) -> bool:
        """Count a signal and return whether it is the first."""
        self._signals += 1
        return self._signals == 1
