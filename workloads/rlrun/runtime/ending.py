"""Stop requests for a process that waits in its main thread."""

from __future__ import annotations

import atexit
import os
import select
import signal
from collections.abc import Callable
from contextlib import suppress


class Ending:
    """Stop request that is made once and stays: a `threading.Event` that a signal handler may set.

    A signal handler runs in the main thread, at any point. Inside `Event.wait` that thread may hold the lock that `Event.set` needs, which
    would be a deadlock; a byte in a pipe needs no lock.
    """

    def __init__(self) -> None:
        self._asked = False
        self._reader, self._writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

    def set(self) -> None:
        """Make the request."""
        self._asked = True
        with suppress(BlockingIOError):
            os.write(self._writer, b"x")

    def is_set(self) -> bool:
        """Return whether the request was made."""
        return self._asked

    def wait(self, seconds: float | None = None) -> bool:
        """Wait for the request, at most `seconds` (None: without a limit). Returns whether it was made."""
        select.select([self._reader], [], [], seconds)
        return self._asked

    def fileno(self) -> int:
        """Descriptor for `select`, readable from the request on; its bytes are never consumed."""
        return self._reader


def on_sigterm(ask: Callable[[], None]) -> None:
    """Call `ask` at each SIGTERM; a signal during the interpreter's exit does not change the exit code.

    A helper process may get several: from its starter, from the kernel when the starting thread ends (PR_SET_PDEATHSIG), and from whatever
    ends all processes of a container. At its exit an interpreter resets handled signals to their default action, but keeps ignored ones
    ignored: without this, a late signal would kill a process that has finished its work, and the exit code would be wrong. The signal is
    not ignored earlier, because child processes inherit that, and would miss a request before they install their own handler.
    """
    signal.signal(signal.SIGTERM, lambda *_: ask())
    atexit.register(signal.signal, signal.SIGTERM, signal.SIG_IGN)
