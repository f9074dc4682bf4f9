"""Waits of tests: a wait fails when nothing makes progress, not at a time of the clock.

A busy machine makes every process slow. A limit in seconds then fails a correct program, and a higher limit only makes a hang take longer.
Each wait of this module polls a condition and fails after `PATIENCE_SECONDS` without progress. Progress is any change of a snapshot that
the caller names: CPU time of processes, sizes of logs, the newest step. Without a snapshot, the polls themselves are counted.

The time without progress is the sum of the polls. A poll counts at most `LONGEST_POLL_SECONDS`: while this process does not run, the
program that it waits for may not run either, so a stopped or overloaded machine uses no patience.

Each wait has a limit of `LIMIT_FACTOR` times the patience, progress or not. `tests.support.programs` waits for processes.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeVar

PATIENCE = "RLRUN_TEST_PATIENCE"
"""Environment variable: seconds without progress after which a wait fails. A small value shows the message of a wait that fails."""
PATIENCE_SECONDS = float(os.environ.get(PATIENCE, "120"))
LIMIT_FACTOR = 10
POLL_SECONDS = 0.02
LONGEST_POLL_SECONDS = 0.25
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
        patience: seconds without progress.
        clock: seconds of a clock that never goes back.
    """

    what: str
    progress: Progress | None = None
    state: Callable[[], object] | None = None
    patience: float = field(default_factory=lambda: PATIENCE_SECONDS)
    clock: Callable[[], float] = time.monotonic
    waited: float = field(default=0.0, init=False)
    still: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        self._last_poll, self._last_look = self.clock(), 0.0
        self._snapshot: object = None

    def poll(self) -> None:
        """Count one poll whose condition was false.

        Raises:
            StalledError: without progress for the time of the patience, or at the limit.
        """
        now = self.clock()
        counted = min(now - self._last_poll, LONGEST_POLL_SECONDS)
        self._last_poll = now
        self.waited += counted
        self.still += counted
        if self.waited - self._last_look >= min(SNAPSHOT_SECONDS, self.patience / 4):
            self._look()
        if self.still >= self.patience:
            raise StalledError(self._message(f"no progress for {self.still:.0f} s"))
        if self.waited >= LIMIT_FACTOR * self.patience:
            raise StalledError(self._message(f"not within {self.waited:.0f} s, with progress"))

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
    what: str,
    *,
    progress: Progress | None = None,
    state: Callable[[], object] | None = None,
    poll_seconds: float = POLL_SECONDS,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> T:
    """Poll `condition` until its value is true; return that value.

    Raises:
        StalledError: nothing made progress.
    """
    wait = Wait(what, progress, state, clock=clock)
    while not (found := condition()):
        wait.poll()
        sleep(poll_seconds)
    return found


async def wait_until_async(
    condition: Callable[[], T],
    what: str,
    *,
    progress: Progress | None = None,
    state: Callable[[], object] | None = None,
    poll_seconds: float = POLL_SECONDS,
) -> T:
    """As `wait_until`, while other tasks of the event loop run."""
    wait = Wait(what, progress, state)
    while not (found := condition()):
        wait.poll()
        await asyncio.sleep(poll_seconds)
    return found


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
    wait, task = Wait(what, progress, state), asyncio.ensure_future(awaitable)
    try:
        while not (await asyncio.wait({task}, timeout=LONGEST_POLL_SECONDS))[0]:
            wait.poll()
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait({task}, timeout=LONGEST_POLL_SECONDS)
    return task.result()
