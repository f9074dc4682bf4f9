"""The journal: a rollout that is finished is durable before it counts, so that no restart plays it again.

Each attempt appends to files of its own, whose names carry it; it never touches those of an earlier one but to delete them. Rollouts that
finish while the disk is busy share the next flush, and all of that happens in a thread: an event loop with a thousand rollouts waits for
none of it.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from loguru import logger

from rlrun.config.roles import OrchestratorConfig
from rlrun.orchestrator.journal_records import Entry, Head, encode, encode_head, groups_of
from rlrun.protocol.durable import fsync_path
from rlrun.protocol.failures import storage_errors
from rlrun.protocol.paths import JournalSegment, RunPaths

SEGMENT_BYTES = 64 * 1024 * 1024
"""A file that is larger gets no more records: files are deleted as a whole."""
_CHUNK_BYTES, _CHUNK_FRAMES = 256 * 1024, 64
"""Handed to the kernel at once: the event loop does not run while bytes are put together."""
_OF_A_ROLLOUT: dict[str, Any] = {
    "model": True,
    "seed": True,
    "seq_len": True,
    "sampling": True,
    "environments": {"__all__": {"id", "name", "args", "group_size", "sampling", "python"}},
}


def rollout_fingerprint(config: OrchestratorConfig) -> str:
    """First 16 hex digits of the SHA-256 over what a rollout is made with."""
    document = config.model_dump(mode="json", include=_OF_A_ROLLOUT)
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()[:16]


class SegmentWriter:
    """The one writer of an attempt's files. Its methods block, and no two of them may run at once.

    Args:
        paths: of the run.
        attempt: goes into the names.
        fingerprint: `rollout_fingerprint`.
        segment_bytes: see `SEGMENT_BYTES`.
    """

    def __init__(self, paths: RunPaths, *, attempt: int, fingerprint: str, segment_bytes: int = SEGMENT_BYTES) -> None:
        self._paths, self._attempt = paths, attempt
        self._head, self._limit = encode_head(Head(fingerprint)), segment_bytes
        self._descriptor: int | None = None
        self._path = paths.journal
        self._size = 0

    def write(self, entries: Sequence[Entry]) -> None:
        """Make entries durable, in this order, with one flush.

        Raises:
            RoleError: the volume refuses.
        """
        with storage_errors(self._paths.journal):
            if self._descriptor is None or self._size >= self._limit:
                self._open()
                self._append([self._head])
            frames: list[bytes] = []
            for entry in entries:
                frames.append(encode(entry))
                if sum(map(len, frames)) >= _CHUNK_BYTES or len(frames) == _CHUNK_FRAMES:
                    self._append(frames)
                    frames = []
            self._append(frames)
            assert self._descriptor is not None
            os.fdatasync(self._descriptor)

    def _append(self, frames: Sequence[bytes]) -> None:
        assert self._descriptor is not None
        rest = memoryview(b"".join(frames))
        self._size += len(rest)
        while rest:
            rest = rest[os.write(self._descriptor, rest) :]

    def _open(self) -> None:
        self.close()
        folder = self._paths.journal
        folder.mkdir(parents=True, exist_ok=True)
        own = [segment.number for segment in self._paths.journal_on_disk() if segment.attempt == self._attempt]
        self._path = self._paths.journal_segment(max(own, default=0) + 1, self._attempt)
        self._descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        self._size = 0
        fsync_path(folder)
        fsync_path(folder.parent)

    def close(self) -> None:
        """End the current file; the next entry begins another one."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def rotate(self) -> list[JournalSegment]:
        """End the current file; returns all files, of any attempt, that get no more records from here."""
        self.close()
        return self._paths.journal_on_disk()


def remove_settled(segments: Iterable[JournalSegment], settled: Callable[[int], bool]) -> list[JournalSegment]:
    """Delete files that tell of settled groups alone; returns them.

    Args:
        segments: files that nobody writes.
        settled: whether the newest complete checkpoint knows that a group was trained on or given up.
    """
    removed = []
    for segment in segments:
        try:
            if all(map(settled, groups_of(segment.path))):
                segment.path.unlink()
                removed.append(segment)
        except OSError as error:
            logger.warning(f"{segment.path} of the journal stays: {error}")
    return removed


class Journal:
    """The event loop's side: many rollouts at once, one flush for those that wait.

    Args:
        writer: of this attempt.
    """

    def __init__(self, writer: SegmentWriter) -> None:
        self._writer = writer
        self._pending: list[Entry] = []
        self._waiting: list[asyncio.Future[None]] = []
        self._work = asyncio.Lock()
        self._flushing: asyncio.Task[None] | None = None
        self._failure: Exception | None = None
        self.flushes = 0

    async def add(self, entry: Entry) -> None:
        """Return once the entry is durable. One whose caller is cancelled becomes durable all the same.

        Raises:
            RoleError: the volume refuses; so does every later call.
        """
        self.note(entry)
        durable: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(durable)
        await durable

    def note(self, entry: Entry) -> None:
        """Make an entry durable some time, at the latest with the next one that is added.

        Raises:
            RoleError: the volume has refused an earlier one.
        """
        if self._failure is not None:
            raise self._failure
        self._pending.append(entry)
        if self._flushing is None:
            self._flushing = asyncio.create_task(self._flush())

    async def _flush(self) -> None:
        try:
            while self._pending:
                async with self._work:
                    entries, self._pending = self._pending, []
                    waiting, self._waiting = self._waiting, []
                    failure = await self._write(entries)
                for durable in waiting:
                    if durable.done():
                        continue
                    if failure is None:
                        durable.set_result(None)
                    else:
                        durable.set_exception(failure)
        finally:
            self._flushing = None

    async def _write(self, entries: Sequence[Entry]) -> Exception | None:
        if self._failure is None:  # after a refusal a file may end in the middle of a record
            try:
                await asyncio.to_thread(self._writer.write, entries)
                self.flushes += 1
            except Exception as error:
                self._failure = error
        return self._failure

    async def collect(self, settled: Callable[[int], bool]) -> None:
        """Delete what a complete checkpoint covers, see `remove_settled`; rollouts that finish meanwhile do not wait for it."""
        async with self._work:
            segments = await asyncio.to_thread(self._writer.rotate)
        await asyncio.to_thread(remove_settled, segments, settled)

    async def close(self) -> None:
        """Flush what is pending and end the file."""
        while (flushing := self._flushing) is not None:
            await asyncio.shield(flushing)
        async with self._work:
            await asyncio.to_thread(self._writer.close)
