"""Group commit: what comes while the disk is busy shares the next flush, and an event loop with a thousand writers waits for none of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Generic, TypeVar

from loguru import logger

from rlrun.orchestrator.aio.volume import in_thread
from rlrun.protocol.files.volume_faults import RefusedError, Volume, retry_pauses

CLOSE_SECONDS = 5.0
"""Longest wait for the last flush: on a volume that does not answer it may never end."""
_WOKEN = 16
"""Writers that go on in one turn of the event loop: thousands wait where the volume was away for a while."""
_T = TypeVar("_T")


class GroupCommit(Generic[_T]):
    """Makes entries durable in the order of their coming.

    Args:
        write: makes some durable with one flush, in a thread; what it has begun when it fails can be written again.
        volume: that it writes to. While it refuses, what is added waits.
        doing: what `write` does, as the end of `cannot ...`.
        end: called once, in a thread, after the last flush.
    """

    def __init__(
        self,
        write: Callable[[Sequence[_T]], None],
        volume: Volume,
        *,
        doing: str,
        end: Callable[[], None] = lambda: None,
    ) -> None:
        self._act, self._volume, self._doing, self._end = write, volume, doing, end
        self._closing = asyncio.Event()
        self._pending: list[_T] = []
        self._waiting: list[asyncio.Future[None]] = []
        self._work = asyncio.Lock()
        self._flushing: asyncio.Task[None] | None = None
        self._failure: Exception | None = None
        self.flushes = 0

    async def add(self, entry: _T) -> None:
        """Return once the entry is durable. One whose caller is cancelled becomes durable all the same.

        Raises:
            RefusedError: it is closed, and the volume still refuses.
        """
        self.note(entry)
        durable: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(durable)
        await durable

    def note(self, entry: _T) -> None:
        """Make an entry durable some time, at the latest with the next one that is added.

        Raises:
            RefusedError: as `add`.
        """
        if self._failure is not None:
            raise self._failure
        self._pending.append(entry)
        if self._flushing is None:
            self._flushing = asyncio.create_task(self._flush())

    @asynccontextmanager
    async def pausing(self) -> AsyncIterator[None]:
        """Hold off all writes while the block runs."""
        async with self._work:
            yield

    async def close(self) -> None:
        """Flush what is pending. What the volume refuses now, or does not take in time, is lost: it never counted."""
        self._closing.set()
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                while (flushing := self._flushing) is not None:
                    await asyncio.shield(flushing)
                async with self._work:
                    await in_thread(self._end)
        except TimeoutError:
            logger.warning(f"cannot {self._doing} in {self._volume.root}, the last ones: the volume does not answer")

    async def _flush(self) -> None:
        try:
            while self._pending:
                async with self._work:
                    entries, self._pending = self._pending, []
                    waiting, self._waiting = self._waiting, []
                    failure = await self._write(entries)
                for number, durable in enumerate(waiting, 1):
                    if number % _WOKEN == 0:
                        await asyncio.sleep(0)
                    if durable.done():
                        continue
                    if failure is None:
                        durable.set_result(None)
                    else:
                        durable.set_exception(failure)
        finally:
            self._flushing = None

    async def _write(self, entries: Sequence[_T]) -> Exception | None:
        for pause in retry_pauses():
            if self._failure is not None:
                break
            try:
                await in_thread(lambda: self._volume.attempt(self._doing, lambda: self._act(entries)))
                self.flushes += 1
                break
            except RefusedError as error:
                if self._closing.is_set():
                    self._failure = error
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._closing.wait(), pause)
            except Exception as error:
                self._failure = error
        return self._failure
