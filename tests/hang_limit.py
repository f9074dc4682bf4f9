"""A plugin of pytest: the option `timeout` ends a test that hangs, and lets a slow one finish.

pytest-timeout sends SIGALRM to this process `timeout` seconds after the start of a test. From then on, the test continues while this
process and its descendants use CPU time, up to `LIMIT_FACTOR` times the option. It fails as before, with the stacks of all threads.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Generator
from typing import Any

import pytest

from tests.support import waiting
from tests.support.programs import tree_progress, tree_states

LIMIT_FACTOR = 4


class HangLimit:
    """Handler of SIGALRM that ends a test without progress.

    Args:
        seconds: value of the option.
        end_test: handler of pytest-timeout.
        progress: snapshot of the work that is done.
        set_alarm: requests the next signal, in seconds.
    """

    def __init__(
        self,
        seconds: float,
        end_test: Callable[[int, Any], None],
        progress: waiting.Progress,
        set_alarm: Callable[[float], object],
    ) -> None:
        self._end_test, self._progress, self._set_alarm = end_test, progress, set_alarm
        self._waited, self._limit = seconds, LIMIT_FACTOR * seconds
        self._snapshot: object = None

    def __call__(self, number: int, frame: Any) -> None:
        __tracebackhide__ = True
        before, self._snapshot = self._snapshot, self._progress()
        if before == self._snapshot or self._waited >= self._limit:
            print(f"no progress, or at the limit of {self._limit:.0f} s; processes:\n{tree_states(os.getpid())}")
            self._end_test(number, frame)
        else:
            self._waited += waiting.PATIENCE_SECONDS
            self._set_alarm(waiting.PATIENCE_SECONDS)


@pytest.hookimpl(wrapper=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> Generator[None, object, object]:
    """Replace the handler that pytest-timeout has set."""
    result = yield
    handler = signal.getsignal(signal.SIGALRM)
    if settings.method == "signal" and callable(handler):  # the other method ends all of pytest, from a thread
        limit = HangLimit(
            settings.timeout,
            handler,
            tree_progress(os.getpid()),
            lambda seconds: signal.setitimer(signal.ITIMER_REAL, seconds),
        )
        signal.signal(signal.SIGALRM, limit)
    return result
