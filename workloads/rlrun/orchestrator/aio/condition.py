"""Waiting for a condition on the state of one event loop."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager


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
