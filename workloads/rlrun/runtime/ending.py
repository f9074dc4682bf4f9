"""The one request to end that a helper process heeds."""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import FrameType


def on_first_sigterm(ask: Callable[[], None]) -> None:
    """Call `ask` at the first SIGTERM, and ignore all later ones.

    A helper may get several: of its starter, of the kernel when the thread that started it ends (PR_SET_PDEATHSIG), and of what ends all
    processes of a container. An interpreter that ends gives a handled signal its default action back, but leaves an ignored one ignored:
    otherwise a late one would kill a process that has done all its work, and its exit code would say that it had not.
    """

    def handle(_number: int, _frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        ask()

    signal.signal(signal.SIGTERM, handle)
