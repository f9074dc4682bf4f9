"""The event loop of an environment's process: user code that wants to stop it, or forks it, costs only its own episode."""

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
    """An event loop that goes on until its process ends, and only in the process that made it.

    Its clock and its tasks are its own: replacing `time.monotonic` or the task factory changes neither.
    """

    def __init__(self) -> None:
        super().__init__()
        self._forked = False
        os.register_at_fork(after_in_child=self._mark_forked)

    def _mark_forked(self) -> None:
        self._forked = True

    @property
    def forked(self) -> bool:
        """True if this is a copy of the loop in a child of its process."""
        return self._forked

    def time(self) -> float:
        """Seconds on the monotonic clock. Asked in each turn of the loop, so that a copy in a forked child ends here."""
        self.end_if_forked()
        return monotonic()

    def end_if_forked(self) -> None:
        """End the process if it is a child that user code forked and let return: it has the parent's connection and episodes."""
        if self._forked:
            os._exit(0)

    def go_on(self) -> None:
        """Run for ever, also when a callback or a task of the environment raises `SystemExit` or stops the loop.

        Raises:
            Exception: the loop itself is broken.
        """
        while True:
            try:
                self.run_forever()
            except (SystemExit, KeyboardInterrupt):
                # Its task has the exception, and so has its waiter; this reports one that nothing waits for.
                print_exception()

    def start_task(self, work: Coroutine[object, object, None]) -> asyncio.Task[None]:
        """A task that user code does not find among all tasks, to cancel it."""
        task = _Task(work, loop=self)
        _unregister(task)
        return task


def print_exception() -> None:
    """Print the exception that is handled, if there is still somewhere to print it."""
    with suppress(BaseException):
        traceback.print_exc()


_Task = asyncio.Task
_unregister = asyncio.tasks._unregister_task


class Stepped(Coroutine[object, object, T]):
    """A coroutine with a call before and after each of its steps.

    Args:
        work: the coroutine.
        before: called before each step.
        after: called after each step, also after one that raised.
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
