"""Waiting for a condition on state that lives in one event loop."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager


class Signal:
    """Wakes every waiter to look again.

    No wake-up is lost: `until` looks and takes the current event without an `await` in between, and `notify` replaces the event.
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
        """Notify `follower` too at each `notify` from now on."""
        self._followers.append(follower)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Return as soon as `condition()` is true; the caller brings the deadline."""
        while not condition():
            await self._event.wait()


class Turns:
    """One at a time, in the order of coming, some before others: of a thousand who wait for the same, only one looks at each change."""

    def __init__(self) -> None:
        self.busy = False
        """True while a holder has the turn."""
        self._waiting: list[tuple[bool, int, asyncio.Future[None]]] = []
        self._numbers = itertools.count()

    @asynccontextmanager
    async def mine(self, *, first: bool) -> AsyncIterator[None]:
        """Wait for the turn and keep it for the block; `first`: before all that are not."""
        if self.busy:
            turn = asyncio.get_running_loop().create_future()
            heapq.heappush(self._waiting, (not first, next(self._numbers), turn))
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():
                    self._pass_on()  # it was given and taken away in the same moment
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
