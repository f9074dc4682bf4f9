"""SIGTERM and SIGINT in the role that feeds the trainer."""

from __future__ import annotations

from collections.abc import Callable

TERMINATED = 128 + 15
"""Exit code after SIGTERM or SIGINT: that of a process which SIGTERM ended."""


class Stop:
    """Reaction to a signal: the first one ends the flow of data, so that the trainer can complete its last checkpoint; before there is
    such a flow, and from the second signal on, it cancels everything. Every artifact is whole or ignored, so nothing is left to tidy up."""

    def __init__(self) -> None:
        self.act: Callable[[], None] | None = None
        """Ends the flow of data, once there is one."""
        self._signals = 0

    def first(self) -> bool:
        """Count a signal; true if it is the first."""
        self._signals += 1
        return self._signals == 1
