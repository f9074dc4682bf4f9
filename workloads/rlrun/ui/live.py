"""Events of runs that change: one look at all folders a second, however many pages are open."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping

CLIENTS_MAX = 256
"""Pages that are served at once."""
OF_ONE_MAX = 16
"""Of them those of one user: nobody keeps the others out."""
View = Callable[[Mapping[str, str]], Mapping[str, str] | None]
_KEEPALIVE_SECONDS = 15.0
"""A comment after so long without a change: what is between sees that the connection lives, and we that it does not."""


class Feed:
    """Fingerprints of all runs, and a wait for their next change.

    Args:
        look: reads the fingerprints; called in a thread, and only while somebody listens.
        seconds: time between two looks.
        passing: errors of a look that the next one may not have: a folder that is being removed.
    """

    def __init__(
        self,
        look: Callable[[], Mapping[str, str]],
        seconds: float = 1.0,
        passing: tuple[type[Exception], ...] = (OSError,),
    ) -> None:
        self._look, self._seconds, self._passing = look, seconds, passing
        self._now: Mapping[str, str] | None = None
        """None: nobody has looked yet."""
        self._number = 0
        """Changes seen; a client that has seen fewer gets the newest state alone."""
        self._changed = asyncio.Condition()
        self._clients: Counter[str | None] = Counter()
        """Pages by their users; None: nobody has to log in."""
        self._task: asyncio.Task[None] | None = None

    def refusal(self, user: str | None = None) -> str | None:
        """Why one more page of a user is not served, in words; None: it is."""
        if user is not None and self._clients[user] >= OF_ONE_MAX:
            return f"you have {OF_ONE_MAX} pages of this server open, which is the most for one user; close some"
        if self._clients.total() >= CLIENTS_MAX:
            return f"{CLIENTS_MAX} pages of this server are open, which is the most for all users; close some, or try again later"
        return None

    async def events(self, view: View | None = None, user: str | None = None) -> AsyncIterator[str]:
        """Server-sent events: at once the fingerprints of the runs, and again after each change.

        Args:
            view: chooses what one page is told; called in a thread before each event, and at least every 15 s. When it gives None, or
                fails, the stream ends. None: everything is told.
            user: of the page.
        """
        if self.refusal(user) is not None:  # pages that came at once have all been answered before any was counted
            return
        self._clients[user] += 1
        seen, told = 0, None
        try:
            if self._task is None:  # nothing is awaited in between: of two pages that come at once, one starts it
                self._task = asyncio.create_task(self._watch())
            while True:
                quiet = seen == self._number and not await self._wait(seen)
                seen, mine = self._number, self._now or {}
                if view is not None:
                    allowed = await asyncio.to_thread(view, mine)
                    if allowed is None:
                        return
                    mine = allowed
                if seen and mine != told:
                    told = mine
                    yield f"event: runs\ndata: {json.dumps(mine)}\n\n"
                elif quiet:  # only then: a change of others' runs is nothing that this page hears of
                    yield ": still here\n\n"
        finally:
            self._clients[user] -= 1
            if self._clients[user] == 0:
                del self._clients[user]
            if not self._clients and self._task is not None:
                self._task.cancel()
                self._task = None

    async def _wait(self, seen: int) -> bool:
        async with self._changed:
            try:
                async with asyncio.timeout(_KEEPALIVE_SECONDS):
                    await self._changed.wait_for(lambda: self._number != seen)
            except TimeoutError:
                return False
            return True

    async def _watch(self) -> None:
        while True:
            await self._refresh()
            await asyncio.sleep(self._seconds)

    async def _refresh(self) -> None:
        try:
            now = await asyncio.to_thread(self._look)
        except self._passing:
            return
        if now != self._now:
            async with self._changed:
                self._now, self._number = now, self._number + 1
                self._changed.notify_all()
