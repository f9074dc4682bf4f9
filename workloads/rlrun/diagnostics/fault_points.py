"""Named points at which tests make a process fail: before and after each step of the file protocol that makes data durable, and between
the calls of a hand-over.

A point does nothing in production: no environment variable and no file of a run can install a handler. The tests' handler is
`tests/support/faults`, which also lists all points.
"""

from __future__ import annotations

from collections.abc import Callable

Handler = Callable[[str], None]
"""Function that is called with the name of each reached point, in its thread. It may raise an OSError, or not return."""

_handler: Handler | None = None


def install_handler(handler: Handler | None) -> None:
    """Call `handler` at every point of this process from now on. None removes the handler."""
    global _handler
    _handler = handler


def reach(point: str) -> None:
    """Mark that this process has reached a point.

    Raises:
        OSError: a test has planned the error for this point.
    """
    if _handler is not None:
        _handler(point)
