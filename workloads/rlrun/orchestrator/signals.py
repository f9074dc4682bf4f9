"""Waiting for a condition on state that lives in one event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Signal:
    """Wakes every waiter to look again.

    No wake-up is lost: `until` looks and takes the current event without an `await` in between, and `notify` replaces the event.
    """

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def notify(self) -> None:
        """Call after a change that somebody may wait for."""
        self._event.set()
        self._event = asyncio.Event()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Return as soon as `condition()` is true; the caller brings the deadline."""
        while not condition():
            await self._event.wait()
