"""Change events of runs: one scan of all folders per second, independent of the number of open pages."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping

CLIENTS_MAX = 256
"""Maximum number of open pages."""
OF_ONE_MAX = 16
"""Maximum number of open pages per user, so that one user cannot block the others."""
View = Callable[[Mapping[str, str]], Mapping[str, str] | None]
_KEEPALIVE_SECONDS = 15.0
"""Seconds without a change after which a comment is sent: proxies keep the connection, and a closed one is detected."""


class Feed:
    """Fingerprints of all runs, and a wait for the next change.

    Args:
        look: function that reads the fingerprints; called in a thread, and only while pages are connected.
        seconds: time between two reads.
        passing: temporary errors of `look`, such as a folder that is being removed.
    """

    def __init__(
        self,
        look: Callable[[], Mapping[str, str]],
        seconds: float = 1.0,
        passing: tuple[type[Exception], ...] = (OSError,),
    ) -> None:
        self._look, self._seconds, self._passing = look, seconds, passing
        self._now: Mapping[str, str] | None = None
        """Newest fingerprints; None before the first read."""
        self._number = 0
        """Number of changes; a client that has seen fewer gets only the newest state."""
        self._changed = asyncio.Condition()
        self._clients: Counter[str | None] = Counter()
        """Number of pages per user; None: a server without login."""
        self._task: asyncio.Task[None] | None = None

    def explain_refusal(self, user: str | None = None) -> str | None:
        """Return why another page of a user is refused, or None."""
        if user is not None and self._clients[user] >= OF_ONE_MAX:
            return f"you have {OF_ONE_MAX} open pages of this server, the maximum per user; close some of them"
        if self._clients.total() >= CLIENTS_MAX:
            return f"{CLIENTS_MAX} pages of this server are open, the maximum for all users; close some of yours, or try again later"
        return None

    async def stream_events(self, view: View | None = None, user: str | None = None) -> AsyncIterator[str]:
        """Yield server-sent events: the fingerprints of the runs immediately, and again after each change.

        Args:
            view: filter of the fingerprints for one page; called in a thread before each event, and at least every 15 s. The stream ends
                if it returns None or fails. None: no filter.
            user: user of the page.
        """
        if (
            self.explain_refusal(user) is not None
        ):  # concurrent requests pass the first check before any of them is counted
            return
        self._clients[user] += 1
        seen, told = 0, None
        try:
            if (
                self._task is None
            ):  # no await before the assignment, so only one of two concurrent pages starts the task
                self._task = asyncio.create_task(self._watch_runs())
            while True:
                quiet = seen == self._number and not await self._wait_for_change(seen)
                seen, mine = self._number, self._now or {}
                if view is not None:
                    allowed = await asyncio.to_thread(view, mine)
                    if allowed is None:
                        return
                    mine = allowed
                if seen and mine != told:
                    told = mine
                    yield f"event: runs\ndata: {json.dumps(mine)}\n\n"
                elif quiet:  # not after a change that the filter hides: its time must stay invisible
                    yield ": still here\n\n"
        finally:
            self._clients[user] -= 1
            if self._clients[user] == 0:
                del self._clients[user]
            if not self._clients and self._task is not None:
                self._task.cancel()
                self._task = None

    async def _wait_for_change(self, seen: int) -> bool:
        async with self._changed:
            try:
                async with asyncio.timeout(_KEEPALIVE_SECONDS):
                    await self._changed.wait_for(lambda: self._number != seen)
            except TimeoutError:
                return False
            return True

    async def _watch_runs(self) -> None:
        while True:
            await self._refresh_fingerprints()
            await asyncio.sleep(self._seconds)

    async def _refresh_fingerprints(self) -> None:
        try:
            now = await asyncio.to_thread(self._look)
        except self._passing:
            return
        if now != self._now:
            async with self._changed:
                self._now, self._number = now, self._number + 1
                self._changed.notify_all()
