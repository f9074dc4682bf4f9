"""Timeout whose clock can be paused."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

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
