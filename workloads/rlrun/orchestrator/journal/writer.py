"""The journal: a rollout that is finished is durable before it counts, so that no restart plays it again.

Each attempt appends to files of its own, whose names carry it; it never touches those of an earlier one but to delete them. Rollouts that
finish while the disk is busy share the next flush, and all of that happens in a thread: an event loop with a thousand rollouts waits for
none of it.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

from loguru import logger

from rlrun.config.models.roles import OrchestratorConfig
from rlrun.diagnostics.fault_points import reach
from rlrun.orchestrator.aio.volume import clean_up, in_thread
from rlrun.orchestrator.journal.format import Entry, Head, encode_entry, encode_head, groups_of
from rlrun.orchestrator.journal.group_commit import GroupCommit
from rlrun.protocol.files.durable import fsync_path, make_folder
from rlrun.protocol.files.paths import JournalSegment, RunPaths
from rlrun.protocol.files.volume_faults import Volume

SEGMENT_BYTES = 64 * 1024 * 1024
"""A file that is larger gets no more records: files are deleted as a whole."""
_CHUNK_BYTES, _CHUNK_FRAMES = 256 * 1024, 64
"""Handed to the kernel at once: the event loop does not run while bytes are put together."""
OF_AN_ENVIRONMENT = {"id", "name", "args", "group_size", "sampling", "python", "image"}
"""Fields of an environment that its rollouts depend on."""
OF_A_ROLLOUT: dict[str, bool | dict[str, set[str]]] = {
    "model": True,
    "seed": True,
    "seq_len": True,
    "sampling": True,
    "trajectory_strategy": True,
    "engine_parsers": True,
    "environments": {"__all__": OF_AN_ENVIRONMENT},
}
"""Fields that a rollout's tokens and their meaning depend on."""


def rollout_fingerprint(config: OrchestratorConfig) -> str:
    """First 16 hex digits of the SHA-256 over what a rollout is made with."""
    document = config.model_dump(mode="json", include=OF_A_ROLLOUT)
    assert document.keys() == OF_A_ROLLOUT.keys(), "pydantic leaves out in silence what is no field"
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
            OSError: the volume refuses. The entries can be written again, to another file: this one may end in the middle of a record,
                and what a failed flush has not written a later one does not write either.
        """
        try:
            if self._descriptor is None or self._size >= self._limit:
                self._open()
                self._append([self._head])
            durable = self._size
            try:
                self._append_all(entries)
                assert self._descriptor is not None
                reach("journal.appended")
                os.fdatasync(self._descriptor)
                reach("journal.durable")
            except OSError:
                with suppress(
                    OSError
                ):  # where it cannot be cut, readers leave out the torn record, and count a whole one once
                    os.ftruncate(self._descriptor or -1, durable)
                raise
        except OSError:
            self.close()
            raise

    def _append_all(self, entries: Sequence[Entry]) -> None:
        frames: list[bytes] = []
        for entry in entries:
            frames.append(encode_entry(entry))
            if sum(map(len, frames)) >= _CHUNK_BYTES or len(frames) == _CHUNK_FRAMES:
                self._append(frames)
                frames = []
        self._append(frames)

    def _append(self, frames: Sequence[bytes]) -> None:
        assert self._descriptor is not None
        rest = memoryview(b"".join(frames))
        self._size += len(rest)
        while rest:
            rest = rest[os.write(self._descriptor, rest) :]

    def _open(self) -> None:
        self.close()
        folder = self._paths.journal
        make_folder(folder)
        own = [segment.number for segment in self._paths.journal_on_disk() if segment.attempt == self._attempt]
        self._path = self._paths.journal_segment(max(own, default=0) + 1, self._attempt)
        self._descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        self._size = 0
        fsync_path(folder)

    def close(self) -> None:
        """End the current file; the next entry begins another one."""
        if self._descriptor is not None:
            descriptor, self._descriptor = self._descriptor, None
            os.close(descriptor)

    def rotate(self) -> list[JournalSegment]:
        """End the current file; returns all files, of any attempt, that get no more records from here."""
        self.close()
        return self._paths.journal_on_disk()


def remove_settled(segments: Iterable[JournalSegment], settled: Callable[[int], bool]) -> list[JournalSegment]:
    """Delete files that hold settled groups alone; returns them.

    Args:
        segments: files that nobody writes.
        settled: whether the newest complete checkpoint knows that a group was trained on or given up.
    """
    removed = []
    for segment in segments:
        try:
            if all(map(settled, groups_of(segment.path))):
                reach("journal.before_remove")
                segment.path.unlink()
                removed.append(segment)
        except OSError as error:
            logger.warning(f"{segment.path} of the journal stays: {error}")
    return removed


class Journal(GroupCommit[Entry]):
    """The event loop's side: many rollouts at once, one flush for those that wait.

    Args:
        writer: of this attempt.
        volume: that it writes to. While it refuses, what is added waits.
    """

    def __init__(self, writer: SegmentWriter, volume: Volume) -> None:
        super().__init__(writer.write, volume, doing="write finished rollouts", end=writer.close)
        self._writer = writer

    async def collect(self, settled: Callable[[int], bool]) -> None:
        """Delete what a complete checkpoint covers, see `remove_settled`; rollouts that finish meanwhile do not wait for it."""
        async with self.pausing():
            segments = await clean_up("end a file of the journal", self._writer.rotate)
        await in_thread(lambda: remove_settled(segments or [], settled))
