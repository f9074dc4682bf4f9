"""Liveness check of the engine's workers. `/health` only shows that the engine's process has not reported its death."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable

from loguru import logger


class Heartbeat:
    """Asks the workers again and again, one question at a time, and remembers when the last answer came."""

    def __init__(
        self,
        ask: Callable[[], Awaitable[object]],
        *,
        interval: float,
        timeout: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`ask` is one round-trip to every worker; it may wait behind a long step. Seconds."""
        self._ask = ask
        self._interval = interval
        self._timeout = timeout
        self._clock = clock
        self._answered: float | None = None
        self.error: str | None = None

    @property
    def alive(self) -> bool:
        """True if the workers answered within the timeout."""
        return self._answered is not None and self._clock() - self._answered < self._timeout

    async def beat(self) -> None:
        """One round-trip; failures are kept in `error`."""
        try:
            await self._ask()
        except Exception as error:
            if self.error is None:
                logger.error("the engine does not answer: {}", error)
            self.error = str(error) or type(error).__name__
        else:
            self._answered, self.error = self._clock(), None

    async def run(self) -> None:
        """Beat until cancelled."""
        with contextlib.suppress(asyncio.CancelledError):
            while True:
                await self.beat()
                await asyncio.sleep(self._interval)
