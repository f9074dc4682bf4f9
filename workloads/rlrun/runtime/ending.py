"""Requests to end, as a helper process beside a run heeds them."""

from __future__ import annotations

import atexit
import signal
from collections.abc import Callable


def on_sigterm(ask: Callable[[], None]) -> None:
    """Call `ask` at each SIGTERM; one that comes while the interpreter ends does not change the exit code.

    A helper may get several: of its starter, of the kernel when the thread that started it ends (PR_SET_PDEATHSIG), and of what ends all
    processes of a container. An interpreter that ends gives a handled signal its default action back, but leaves an ignored one ignored:
    otherwise a late one would kill a process that has done all its work, and its exit code would say that it had not. It is ignored no
    earlier, because what a process starts inherits that, and would not hear a request that comes before its own handler is there.
    """
    signal.signal(signal.SIGTERM, lambda *_: ask())
    atexit.register(signal.signal, signal.SIGTERM, signal.SIG_IGN)
