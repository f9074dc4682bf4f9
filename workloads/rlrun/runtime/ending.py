"""Requests to end, as a process heeds them that waits for them in its main thread."""

from __future__ import annotations

import atexit
import os
import select
import signal
from collections.abc import Callable
from contextlib import suppress


class Ending:
    """A request to end that is made once and stays: a `threading.Event` that a handler of signals may set.

    A handler runs in the main thread, wherever that is. If it is inside `Event.wait`, it may hold the lock that `Event.set` takes, and
    waits for itself for ever; a byte in a pipe needs no lock.
    """

    def __init__(self) -> None:
        self._asked = False
        self._reader, self._writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

    def set(self) -> None:
        """Ask."""
        self._asked = True
        with suppress(BlockingIOError):
            os.write(self._writer, b"x")

    def is_set(self) -> bool:
        """True once it was asked for."""
        return self._asked

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until it is asked for, for `seconds` at most (None: without a limit); True if it was."""
        select.select([self._reader], [], [], seconds)
        return self._asked

    def fileno(self) -> int:
        """Descriptor for `select`: readable from the request on; its bytes are never consumed."""
        return self._reader


def on_sigterm(ask: Callable[[], None]) -> None:
    """Call `ask` at each SIGTERM; one that comes while the interpreter ends does not change the exit code.

    A helper may get several: of its starter, of the kernel when the thread that started it ends (PR_SET_PDEATHSIG), and of what ends all
    processes of a container. An interpreter that ends gives a handled signal its default action back, but leaves an ignored one ignored:
    otherwise a late one would kill a process that has done all its work, and its exit code would say that it had not. It is ignored no
    earlier, because what a process starts inherits that, and would not hear a request that comes before its own handler is there.
    """
    signal.signal(signal.SIGTERM, lambda *_: ask())
    atexit.register(signal.signal, signal.SIGTERM, signal.SIG_IGN)
