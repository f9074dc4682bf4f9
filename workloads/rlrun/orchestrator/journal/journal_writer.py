"""Journal of finished rollouts: a rollout is durable before it counts, so that no restart plays it again.

Group commit: entries that arrive during a flush share the next one. Flushes run in a thread, so that the event loop
with a thousand rollouts never waits for the disk.

Each attempt appends only to its own files, which have its number in their names, and deletes only files of earlier
attempts.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Generic, TypeVar

from loguru import logger

from rlrun.config.models.roles import OrchestratorConfig
from rlrun.diagnostics.fault_points import reach
from rlrun.orchestrator.aio.volume_access import clean_up, in_thread
from rlrun.orchestrator.journal.frames import Entry, Head, encode_entry, encode_head, groups_of
from rlrun.orchestrator.journal.route_frames import encode_routes
from rlrun.protocol.files.durable import fsync_path, make_folder
from rlrun.protocol.files.paths import JournalSegment, RunPaths
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
        # One flush at a time. Entries that arrive during it share the next one, so the number of
        # fsyncs does not grow with the number of rollouts.
        if self._flushing is None:
            self._flushing = asyncio.create_task(self._flush_pending())

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
                    # A timeout of this wait must not cancel the flush: callers of `add` wait for
                    # its result.
                    await asyncio.shield(flushing)
                async with self._work:
                    await in_thread(self._end)
        except TimeoutError:
            logger.warning(
                f"cannot {self._doing} at the end of the attempt: the volume {self._volume.root} does not answer"
            )

    async def _flush_pending(self) -> None:
        try:
            while self._pending:
                async with self._work:
                    # Taken under the lock: `pausing` then guarantees that no entry is between the
                    # queue and the file.
                    entries, self._pending = self._pending, []
                    waiting, self._waiting = self._waiting, []
                    failure = await self._write_entries(entries)
                for number, durable in enumerate(waiting, 1):
                    # Waking thousands of rollouts in one go would block the event loop.
                    if number % _WOKEN == 0:
                        await asyncio.sleep(0)
                    # The caller was canceled. Its entry is durable anyway, and a restart uses it.
                    if durable.done():
                        continue
                    if failure is None:
                        durable.set_result(None)
                    else:
                        durable.set_exception(failure)
        finally:
            self._flushing = None

    async def _write_entries(self, entries: Sequence[_T]) -> Exception | None:
        for pause in retry_pauses():
            if self._failure is not None:
                break
            try:
                await in_thread(lambda: self._volume.attempt(self._doing, lambda: self._act(entries)))
                self.flushes += 1
                break
            except RefusedError as error:
                # While the attempt runs, entries wait for the volume. At the end they fail, because
                # the process must not wait forever.
                if self._closing.is_set():
                    self._failure = error
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._closing.wait(), pause)
            except Exception as error:
                self._failure = error
        return self._failure


SEGMENT_BYTES = 64 * 1024 * 1024
"""Size from which a file gets no more records, because files are only deleted completely."""
_CHUNK_BYTES, _CHUNK_FRAMES = 256 * 1024, 64
"""Limits of one write call: joining bytes holds the GIL, which blocks the event loop."""
OF_AN_ENVIRONMENT = {"id", "name", "args", "group_size", "sampling", "python", "image"}
"""Fields of an environment that affect its rollouts."""
OF_A_ROLLOUT: dict[str, bool | dict[str, set[str]]] = {
    "model": True,
    "seed": True,
    "seq_len": True,
    "sampling": True,
    "trajectory_strategy": True,
    "engine_parsers": True,
    "environments": {"__all__": OF_AN_ENVIRONMENT},
}
"""Fields that affect a rollout's tokens and their meaning."""


def rollout_fingerprint(config: OrchestratorConfig) -> str:
    """Return the first 16 hex digits of the SHA-256 of the settings that affect rollouts."""
    document = config.model_dump(mode="json", include=OF_A_ROLLOUT)
    assert document.keys() == OF_A_ROLLOUT.keys(), "pydantic silently omits unknown field names"
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()[:16]


class SegmentWriter:
    """Only writer of an attempt's files. Its methods block and must not run in parallel.

    Args:
        paths: paths of the run.
        attempt: number of the attempt, part of the file names.
        fingerprint: result of `rollout_fingerprint`.
        segment_bytes: size limit, see `SEGMENT_BYTES`.
    """

    def __init__(self, paths: RunPaths, *, attempt: int, fingerprint: str, segment_bytes: int = SEGMENT_BYTES) -> None:
        self._paths, self._attempt = paths, attempt
        self._head, self._limit = encode_head(Head(fingerprint)), segment_bytes
        self._descriptor: int | None = None
        self._path = paths.journal
        self._number, self._size = 0, 0

    def write(self, entries: Sequence[Entry]) -> None:
        """Write entries durably, in this order, with one flush.

        Raises:
            OSError: the volume refuses the write. The entries can be written again, to another file: this file may
                end in the middle of a record, and a later flush does not write the data of a failed one.
        """
        try:
            if self._descriptor is None or self._size >= self._limit:
                self._open_segment()
                self._append_frames([self._head])
            self._append_routes(entries)
            # A failed write or fsync is cut off here, so that the file ends with a complete record.
            durable = self._size
            try:
                self._append_all(entries)
                assert self._descriptor is not None
                reach("journal.appended")
                os.fdatasync(self._descriptor)
                reach("journal.durable")
            except OSError:
                # If the file cannot be truncated, readers skip the torn record and count a complete one only once.
                with suppress(OSError):
                    os.ftruncate(self._descriptor or -1, durable)
                raise
        except OSError:
            self.close()
            raise

    def _append_routes(self, entries: Sequence[Entry]) -> None:
        """Append the routes of rollouts to their own file, without a flush; see `route_frames`."""
        records = [record for entry in entries if (record := encode_routes(entry))]
        if not records:
            return
        path = JournalSegment(self._attempt, self._number, self._path).routes
        try:
            with path.open("ab") as file:
                file.writelines(records)
        except OSError as error:
            logger.warning(f"cannot write {path} ({error}): after a restart these rollouts are routed natively")

    def _append_all(self, entries: Sequence[Entry]) -> None:
        frames: list[bytes] = []
        for entry in entries:
            frames.append(encode_entry(entry))
            if sum(map(len, frames)) >= _CHUNK_BYTES or len(frames) == _CHUNK_FRAMES:
                self._append_frames(frames)
                frames = []
        self._append_frames(frames)

    def _append_frames(self, frames: Sequence[bytes]) -> None:
        assert self._descriptor is not None
        rest = memoryview(b"".join(frames))
        self._size += len(rest)
        while rest:
            rest = rest[os.write(self._descriptor, rest) :]

    def _open_segment(self) -> None:
        self.close()
        folder = self._paths.journal
        make_folder(folder)
        own = [segment.number for segment in self._paths.journal_on_disk() if segment.attempt == self._attempt]
        # A new number for every file: after a failed fsync the state of the old file is unknown,
        # and nothing is appended to it.
        self._number = max(own, default=0) + 1
        self._path = self._paths.journal_segment(self._number, self._attempt)
        self._descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        self._size = 0
        # Without it a power failure can lose the folder's entry, and with it all durable records of
        # the file.
        fsync_path(folder)

    def close(self) -> None:
        """Close the current file; the next entry starts a new one."""
        if self._descriptor is not None:
            descriptor, self._descriptor = self._descriptor, None
            os.close(descriptor)

    def rotate(self) -> list[JournalSegment]:
        """Close the current file and return all files of all attempts, which this writer no longer changes."""
        self.close()
        return self._paths.journal_on_disk()


def remove_settled(segments: Iterable[JournalSegment], settled: Callable[[int], bool]) -> list[JournalSegment]:
    """Delete files, each with its file of routes, that contain only settled groups, and return them.

    Args:
        segments: closed files.
        settled: whether the newest complete checkpoint covers a group as trained or dropped.
    """
    removed = []
    for segment in segments:
        try:
            if all(map(settled, groups_of(segment.path))):
                reach("journal.before_remove")
                segment.routes.unlink(
                    missing_ok=True
                )  # first, so that a killed attempt leaves no routes without a journal file
                segment.path.unlink()
                removed.append(segment)
        except OSError as error:
            logger.warning(f"cannot delete the journal file {segment.path}: {error}")
    return removed


class Journal(GroupCommit[Entry]):
    """Asynchronous interface of the journal: many rollouts share one flush.

    Args:
        writer: writer of this attempt.
        volume: volume of the files. While it refuses writes, entries wait.
    """

    def __init__(self, writer: SegmentWriter, volume: Volume) -> None:
        super().__init__(writer.write, volume, doing="write finished rollouts", end=writer.close)
        self._writer = writer

    async def collect(self, settled: Callable[[int], bool]) -> None:
        """Delete the files that a complete checkpoint covers, see `remove_settled`. Rollouts that finish at the same
        time wait only for the rotation.
        """
        async with self.pausing():
            segments = await clean_up("close a file of the journal", self._writer.rotate)
        await in_thread(lambda: remove_settled(segments or [], settled))
