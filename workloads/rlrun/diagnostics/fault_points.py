"""Named moments at which tests break a process: before and after everything that the file protocol makes durable, and between the calls
of a hand-over. A point does nothing here: no variable and no file of a run installs a handler. That of the tests is
`tests/support/faults`, with the list of all points.
"""

from __future__ import annotations

from collections.abc import Callable

Handler = Callable[[str], None]
"""Called with the name of each point that is reached, in the thread that reaches it; may raise an OSError, or not return."""

_handler: Handler | None = None


def install(handler: Handler | None) -> None:
    """Call `handler` at every point of this process from now on; None: nothing."""
    global _handler
    _handler = handler


def reach(point: str) -> None:
    """Mark that this process is at a point.

    Raises:
        OSError: a test has planned one for this point.
    """
    if _handler is not None:
        _handler(point)
