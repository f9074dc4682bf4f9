"""Group commit: entries that arrive during a flush share the next one, and the event loop never waits for the disk."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Generic, TypeVar

from loguru import logger

from rlrun.orchestrator.aio.volume import in_thread
from rlrun.protocol.files.volume_faults import RefusedError, Volume, retry_pauses

CLOSE_SECONDS = 5.0
"""Timeout of the last flush, which may never end on a volume that does not answer."""
_WOKEN = 16
"""Writers resumed in one turn of the event loop. Thousands may wait after an outage of the volume."""
_T = TypeVar("_T")


class GroupCommit(Generic[_T]):
    """Durable writer of entries in the order of their arrival.

    Args:
        write: function that makes entries durable with one flush, in a thread. After a failure its entries can be
            written again.
        volume: volume of the files. While it refuses writes, entries wait.
        doing: description of `write`, as the end of `cannot ...`.
        end: callback in a thread after the last flush.
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
        """Add an entry and return when it is durable. The entry becomes durable even if the caller is canceled.

        Raises:
            RefusedError: the writer is closed and the volume still refuses writes.
        """
        self.note(entry)
        durable: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(durable)
        await durable

    def note(self, entry: _T) -> None:
        """Add an entry that becomes durable later, at the latest with the next entry of `add`.

        Raises:
            RefusedError: see `add`.
        """
        if self._failure is not None:
            raise self._failure
        self._pending.append(entry)
        if self._flushing is None:
            self._flushing = asyncio.create_task(self._flush())

    @asynccontextmanager
    async def pausing(self) -> AsyncIterator[None]:
        """Block all writes during the block."""
        async with self._work:
            yield

    async def close(self) -> None:
        """Flush the pending entries. Entries that the volume refuses or does not take in time are lost; they never
        counted.
        """
        self._closing.set()
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                while (flushing := self._flushing) is not None:
                    await asyncio.shield(flushing)
                async with self._work:
                    await in_thread(self._end)
        except TimeoutError:
            logger.warning(
                f"cannot {self._doing} at the end of the attempt: the volume {self._volume.root} does not answer"
            )

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
