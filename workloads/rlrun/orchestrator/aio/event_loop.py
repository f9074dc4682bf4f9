"""Tools for code in one event loop: background tasks, waiting for conditions, pausable timeouts, and the limit of open files.

Background tasks run until the role's main work ends. Each request in flight needs a connection and each environment process needs pipes, so
the limit of open files is raised.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import resource
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass

from loguru import logger

from rlrun.config.models.roles import OrchestratorConfig

Background = Callable[[Coroutine[object, object, None]], object]
"""Function that starts an endless coroutine."""


@asynccontextmanager
async def background_tasks() -> AsyncIterator[Background]:
    """Provide a function that starts endless coroutines. They are canceled at the end of the block; an error in one
    ends the block.
    """
    async with asyncio.TaskGroup() as group:
        tasks: list[asyncio.Task[None]] = []

        def start(work: Coroutine[object, object, None]) -> None:
            tasks.append(group.create_task(work))

        yield start
        for task in tasks:
            task.cancel()


class Signal:
    """Wake-up of all waiters, which then check their conditions.

    No wake-up is lost: `until` checks the condition and takes the current event without an `await` in between, and
    `notify` replaces the event.
    """

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self._followers: list[Signal] = []

    def notify(self) -> None:
        """Wake the waiters after a change."""
        self._event.set()
        self._event = asyncio.Event()
        for follower in self._followers:
            follower.notify()

    def follow(self, follower: Signal) -> None:
        """Notify `follower` too at each later `notify`."""
        self._followers.append(follower)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Return as soon as `condition()` is true. The caller sets the timeout."""
        while not condition():
            await self._event.wait()


class Turns:
    """Queue with two priorities that lets one waiter proceed at a time.

    With a thousand waiters for the same resource, only one checks its condition at each change.
    """

    def __init__(self) -> None:
        self.busy = False
        """Whether a holder has the turn."""
        self._waiting: list[tuple[bool, int, asyncio.Future[None]]] = []
        self._numbers = itertools.count()

    @asynccontextmanager
    async def mine(self, *, first: bool) -> AsyncIterator[None]:
        """Wait for the turn and keep it for the block.

        Args:
            first: whether to precede all waiters without this flag.
        """
        if self.busy:
            turn = asyncio.get_running_loop().create_future()
            heapq.heappush(self._waiting, (not first, next(self._numbers), turn))
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():
                    self._pass_on()  # the turn arrived together with the cancellation
                raise
        self.busy = True
        try:
            yield
        finally:
            self._pass_on()

    def _pass_on(self) -> None:
        while self._waiting:
            _, _, turn = heapq.heappop(self._waiting)
            if not turn.done():
                turn.set_result(None)
                return
        self.busy = False


LOOK_SECONDS = 0.1
"""Interval between two checks whether the clock is paused."""


@dataclass
class Clock:
    """Elapsed seconds of a timeout. Without a timeout they stay 0."""

    running: float = 0.0
    standing: float = 0.0


@asynccontextmanager
async def pausable_timeout(seconds: float | None, stands: Callable[[], bool]) -> AsyncIterator[Clock]:
    """Limit the time of the block, without the time during which `stands()` is true.

    Args:
        seconds: timeout. None: no limit.
        stands: whether the clock is paused. Called every `LOOK_SECONDS`; its result counts for the time since the
            previous call.

    Raises:
        TimeoutError: the timeout has passed; the block is canceled.
    """
    clock = Clock()
    if seconds is None:
        yield clock
        return
    async with asyncio.timeout(None) as limit:
        counting = asyncio.create_task(_count_late(clock, limit, seconds, stands))
        try:
            yield clock
        finally:
            counting.cancel()


async def _count_late(clock: Clock, limit: asyncio.Timeout, seconds: float, stands: Callable[[], bool]) -> None:
    loop = asyncio.get_running_loop()
    now = loop.time()
    while clock.running < seconds:
        await asyncio.sleep(min(LOOK_SECONDS, seconds - clock.running))
        before, now = now, loop.time()
        if stands():
            clock.standing += now - before
        else:
            clock.running += now - before
    limit.reschedule(now)


MOST = 1 << 20
"""Upper bound of the limit. Programs that environments start may iterate over all numbers up to the limit."""
RESERVED = 256
"""Files of the orchestrator process: libraries, logs, metrics and connections to the trainer."""
PER_PROCESS = 16
"""Files of one environment process: pipes, log and socket."""


def needed_files(config: OrchestratorConfig) -> int:
    """Return the largest number of files that a run opens at the same time."""
    return config.max_concurrency + PER_PROCESS * sum(e.workers for e in config.environments) + RESERVED


def raise_limit(config: OrchestratorConfig) -> int:
    """Raise the soft limit of open files to the hard limit and return it.

    Logs a warning if the limit is too low for the run.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = _finite_limit(hard)
    if _finite_limit(soft) < limit:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
        except (OSError, ValueError) as error:
            logger.warning(f"cannot raise the limit of open files above {soft}: {error}")
            limit = soft
    else:
        limit = _finite_limit(soft)
    if limit < (files := needed_files(config)):
        logger.warning(
            f"the limit of open files (ulimit -n) is {limit}, but maxConcurrency ({config.max_concurrency}) can need {files}: raise the "
            f"hard limit, or set maxConcurrency to {max(1, config.max_concurrency - (files - limit))}"
        )
    return limit


def _finite_limit(limit: int) -> int:
    return MOST if limit == resource.RLIM_INFINITY else min(limit, MOST)
