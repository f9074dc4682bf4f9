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
    """Event loop that runs until its process ends, and only in the process that created it. A process creates one.

    User code that replaces `time.monotonic`, `asyncio.Task` or the task factory does not change the loop's clock and tasks: this module
    stores the originals before user code is imported.
    """

    def __init__(self) -> None:
        super().__init__()
        self._forked = False
        # A callback cannot be unregistered, and it keeps the loop alive until the process ends.
        os.register_at_fork(after_in_child=self._mark_forked)

    def _mark_forked(self) -> None:
        self._forked = True

    @property
    def forked(self) -> bool:
        """Whether this is a copy of the loop in a forked child."""
        return self._forked

    def time(self) -> float:
        """Return the seconds of the monotonic clock, but exit the process if it is a forked child.

        The loop reads its clock in each turn, so the copy of the loop in a forked child ends here.
        """
        self.end_if_forked()
        return monotonic()

    def end_if_forked(self) -> None:
        """Exit the process if it is a forked child.

        User code that forks may return from its call in the child, too, instead of exiting there. The child would then continue the
        copies of the parent's connection and episodes.
        """
        if self._forked:
            os._exit(0)

    def run_without_end(self) -> None:
        """Run without end, even if a callback or task of the environment raises `SystemExit` or `KeyboardInterrupt`, or stops the loop.

        Raises:
            Exception: an error of the loop itself; asyncio catches those of callbacks and tasks.
        """
        while True:
            try:
                self.run_forever()
            except (SystemExit, KeyboardInterrupt):
                # A task has stored its exception, and code that awaits the task receives it. Nothing else reports the exception of a
                # callback, or of a task that no code awaits.
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


# Originals, stored before user code can replace them. asyncio has no public function that removes a task from `all_tasks`.
_Task = asyncio.Task
_unregister = asyncio.tasks._unregister_task


class StepHooks(Coroutine[object, object, T]):
    """Coroutine that makes a call before and after each step of another coroutine, if a task runs it (`EpisodeLoop.start_task`).

    `await` delegates the steps directly to the other coroutine, without these calls.

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
        """Close the other coroutine, without the calls."""
        self._work.close()
