"""Liveness check of the engine's workers. `/health` only reports an engine process that has announced its own death."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable

from loguru import logger


class Heartbeat:
    """Periodic round trip to the workers, one at a time, with the time of the last response."""

    def __init__(
        self,
        ask: Callable[[], Awaitable[object]],
        *,
        interval: float,
        timeout: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create a heartbeat. `ask` is one round trip to every worker and may wait behind a long step. Times in seconds."""
        self._ask = ask
        self._interval = interval
        self._timeout = timeout
        self._clock = clock
        self._answered: float | None = None
        self.error: str | None = None

    @property
    def is_alive(self) -> bool:
        """Whether the workers responded within the timeout."""
        return self._answered is not None and self._clock() - self._answered < self._timeout

    async def check_workers(self) -> None:
        """Make one round trip; a failure is stored in `error`."""
        try:
            await self._ask()
        except Exception as error:
            if self.error is None:
                logger.error("the engine does not respond: {}", error)
            self.error = str(error) or type(error).__name__
        else:
            self._answered, self.error = self._clock(), None

    async def run(self) -> None:
        """Repeat `beat` until cancelled."""
        with contextlib.suppress(asyncio.CancelledError):
            while True:
                await self.check_workers()
                await asyncio.sleep(self._interval)
