"""Event loop of an environment's process. User code that stops the loop or forks the process harms only its own episode."""

from __future__ import annotations

import asyncio
import os
import traceback
from collections.abc import Callable, Coroutine, Generator
from contextlib import suppress
from time import monotonic
from typing import Any, TypeVar

T = TypeVar("T")


class EpisodeLoop(asyncio.SelectorEventLoop):
    """Event loop that runs until its process ends, and only in the process that created it.

    User code that replaces `time.monotonic` or the task factory does not change the loop's clock and tasks.
    """

    def __init__(self) -> None:
        super().__init__()
        self._forked = False
        os.register_at_fork(after_in_child=self._mark_forked)

    def _mark_forked(self) -> None:
        self._forked = True

    @property
    def forked(self) -> bool:
        """Whether this is a copy of the loop in a forked child."""
        return self._forked

    def time(self) -> float:
        """Return the seconds of the monotonic clock. The loop calls this in each turn, so a copy in a forked child exits here."""
        self.end_if_forked()
        return monotonic()

    def end_if_forked(self) -> None:
        """Exit if this process is a forked child that user code let return: it has copies of the parent's connection and episodes."""
        if self._forked:
            os._exit(0)

    def run_without_end(self) -> None:
        """Run without end, even if a callback or task of the environment raises `SystemExit` or stops the loop.

        Raises:
            Exception: the loop itself is broken.
        """
        while True:
            try:
                self.run_forever()
            except (SystemExit, KeyboardInterrupt):
                # The task and its waiter have the exception already; this prints one that has no waiter.
                print_exception()

    def start_task(self, work: Coroutine[object, object, None]) -> asyncio.Task[None]:
        """Start a task that is not in `asyncio.all_tasks()`, so that user code that cancels all tasks does not cancel it."""
        task = _Task(work, loop=self)
        _unregister(task)
        return task


def print_exception() -> None:
    """Print the current exception. Errors, such as a closed stderr, are ignored."""
    with suppress(BaseException):
        traceback.print_exc()


_Task = asyncio.Task
_unregister = asyncio.tasks._unregister_task


class Stepped(Coroutine[object, object, T]):
    """Coroutine that makes a call before and after each step of another coroutine.

    Args:
        work: wrapped coroutine.
        before: function to call before each step.
        after: function to call after each step, even if the step raised.
    """

    def __init__(
        self, work: Coroutine[object, object, T], before: Callable[[], None], after: Callable[[], None]
    ) -> None:
        self._work, self._before, self._after = work, before, after

    def __await__(self) -> Generator[object, object, T]:
        return (yield from self._work.__await__())

    def send(self, value: object) -> object:
        self._before()
        try:
            return self._work.send(value)
        finally:
            self._after()

    def throw(self, *error: Any) -> object:
        self._before()
        try:
            return self._work.throw(*error)
        finally:
            self._after()

    def close(self) -> None:
        self._work.close()
