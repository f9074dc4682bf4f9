"""Waits of tests: a wait fails when nothing makes progress, not at a time of the clock.

A busy machine makes every process slow. A limit in seconds then fails a correct program, and a higher limit only makes a hang take longer.
Each wait of this module polls a condition and fails after `PATIENCE_SECONDS` without progress. Progress is any change of a snapshot that
the caller names: CPU time of processes, sizes of logs, the newest step. Without a snapshot, the polls themselves are counted.

Without a snapshot, a sleep between two polls counts at most `LATE_FACTOR` times its length: while this process or its event loop is late,
so is the work that it waits for. A stopped or overloaded machine uses little patience. With a snapshot, the clock counts: the snapshot
shows progress on a slow machine, and processes that only poll do more of it in a longer time.

Each wait has a limit of `LIMIT_FACTOR` times the patience, progress or not. `tests.support.programs` waits for processes.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeVar

PATIENCE = "RLRUN_TEST_PATIENCE"
"""Environment variable: seconds without progress after which a wait fails. A small value shows the message of a failed
wait."""
PATIENCE_SECONDS = float(os.environ.get(PATIENCE, "120"))
LIMIT_FACTOR = 20
UNREACHED_SECONDS = 100 * PATIENCE_SECONDS
"""A time limit of the product that a test never reaches; limits under test are short."""
POLL_SECONDS = 0.02
LONG_POLL_SECONDS = 0.25
"""Interval of polls that end as soon as the result is there."""
LATE_FACTOR = 5
LONGEST_LOOK_SECONDS = 10.0
"""Upper limit of a counted time between two polls: in a longer one the machine was stopped."""
SNAPSHOT_SECONDS = 1.0
"""Time between two snapshots of the progress: a look at all processes takes some milliseconds."""

T = TypeVar("T")
Progress = Callable[[], object]
"""A snapshot of the work that is done; two snapshots that differ are progress."""


class StalledError(AssertionError):
    """Nothing made progress for the time of the patience."""


@dataclass
class Wait:
    """The patience of one wait.

    Attributes:
        what: the condition, in words.
        progress: snapshot of the work that is done, or None if only the polls count.
        state: text for the message of a failure.
        poll_seconds: interval of the polls.
        patience: seconds without progress.
        clock: seconds of a clock that never goes back.
    """

    what: str
    progress: Progress | None = None
    state: Callable[[], object] | None = None
    poll_seconds: float = POLL_SECONDS
    patience: float = field(default_factory=lambda: PATIENCE_SECONDS)
    clock: Callable[[], float] = time.monotonic
    waited: float = field(default=0.0, init=False)
    still: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        self._counted_at, self._last_look = self.clock(), 0.0
        self._snapshot: object = None

    def poll(self) -> None:
        """Count a look at a condition that was false.

        Raises:
            StalledError: without progress for the time of the patience, or at the limit.
        """
        self._count(LONGEST_LOOK_SECONDS)
        if self.waited - self._last_look >= min(SNAPSHOT_SECONDS, self.patience / 4):
            self._look()
        if self.still >= self.patience:
            raise StalledError(self._message(f"no progress for {self.still:.0f} s"))
        if self.waited >= LIMIT_FACTOR * self.patience:
            raise StalledError(self._message(f"not within {self.waited:.0f} s, with progress"))

    def woke(self) -> None:
        """Count a sleep of `poll_seconds`."""
        self._count(LATE_FACTOR * self.poll_seconds if self.progress is None else LONGEST_LOOK_SECONDS)

    def _count(self, longest: float) -> None:
        now = self.clock()
        counted = min(now - self._counted_at, longest)
        self._counted_at = now
        self.waited += counted
        self.still += counted

    def _look(self) -> None:
        self._last_look = self.waited
        if self.progress is not None and (snapshot := self.progress()) != self._snapshot:
            self._snapshot, self.still = snapshot, 0.0

    def _message(self, why: str) -> str:
        lines = [f"{self.what}: {why} (waited {self.waited:.0f} s)"]
        if self.progress is not None:
            lines.append(f"last progress: {self._snapshot}, {self.still:.0f} s before")
        if self.state is not None:
            lines.append(f"state: {self.state()}")
        return "\n".join(lines)


def wait_until(
    condition: Callable[[], T],
    what: str = "",
    *,
    progress: Progress | None = None,
    state: Callable[[], object] | None = None,
    poll_seconds: float = POLL_SECONDS,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> T:
    """Poll `condition` until its value is true; return that value.

    Args:
        condition: function that is polled.
        what: the condition, in words. Default: its source.
        progress: snapshot of the finished work.
        state: text for the message of a failure.
        poll_seconds: interval of the polls.
        clock: seconds of a clock that never goes back.
        sleep: function that waits for a number of seconds.

    Raises:
        StalledError: nothing made progress.
    """
    wait = Wait(what or _source(condition), progress, state, poll_seconds, clock=clock)
    while not (found := condition()):
        wait.poll()
        sleep(poll_seconds)
        wait.woke()
    return found


async def wait_until_async(
    condition: Callable[[], object],
    what: str = "",
    *,
    progress: Progress | None = None,
    state: Callable[[], object] | None = None,
    poll_seconds: float = POLL_SECONDS,
) -> None:
    """Poll `condition` until it is true, while other tasks of the event loop run; it may be a coroutine function."""
    wait = Wait(what or _source(condition), progress, state, poll_seconds)
    while True:
        found = condition()
        if await found if isinstance(found, Awaitable) else found:
            return
        wait.poll()
        await asyncio.sleep(poll_seconds)
        wait.woke()


async def result_of(
    awaitable: Awaitable[T],
    what: str,
    *,
    progress: Progress | None = None,
    state: Callable[[], object] | None = None,
) -> T:
    """Await a result; after a failure its task is canceled.

    Raises:
        StalledError: nothing made progress.
    """
    wait, task = Wait(what, progress, state, LONG_POLL_SECONDS), asyncio.ensure_future(awaitable)
    try:
        while not (await asyncio.wait({task}, timeout=LONG_POLL_SECONDS))[0]:
            wait.woke()
            wait.poll()
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait({task}, timeout=LONG_POLL_SECONDS)
    return task.result()


def _source(condition: Callable[..., object]) -> str:
    """Return the source of a condition, for a message."""
    try:
        return " ".join(inspect.getsource(condition).split())[:300]
    except (OSError, TypeError):
        return repr(condition)
