"""Shared memory of an engine's machine, in which a version is assembled before the engine is changed.

A version is a folder with one safetensors file per bucket, which the workers load like a published folder: each worker reads the parts that
it needs, and all workers share one copy.
"""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rlrun.inference.weights.preflight import INDEX
from rlrun.protocol.messages.buckets import Bucket

SHARED_MEMORY = Path("/dev/shm")  # each process uses its own folder in it
_PREFIX, _LOCK = "rlrun-weights-", "lock"


@dataclass(frozen=True)
class Whole:
    """Complete version in shared memory."""

    folder: Path
    checksum: int
    """Checksum of the version, see `buckets.version_checksum`."""


class NoRoomError(Exception):
    """Error for a version that does not fit; the message contains the settings to change."""


class Staging:
    """Folders of versions, in a folder of this process that is deleted with it. Used by one thread at a time.

    Args:
        memory: folder in memory. Default: the machine's shared memory, or the folder for temporary files if there is none.
    """

    def __init__(self, memory: Path | None = None) -> None:
        self._memory = memory or (SHARED_MEMORY if SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir()))
        self._folder: Path | None = None
        self._lock: int | None = None
        self.whole: Whole | None = None
        """Complete, verified version, which can be the base of the next version."""

    def open(self, version: int, buckets: Sequence[Bucket]) -> Path:
        """Create a folder for a version with the index of its bucket files; older versions are deleted.

        Raises:
            NoRoomError: the version does not fit.
        """
        root = self._own()
        self.drop_all()
        size = sum(bucket.size + len(bucket.header()) for bucket in buckets)
        free = shutil.disk_usage(root).free
        if free < size:
            raise NoRoomError(
                f"version {version} needs {_show_gib(size)} of the engine's shared memory ({self._memory}), "
                f"but {_show_gib(free)} are free;  "
                "increase inference.sharedMemory and the memory of the engine's container, or set weightSync.transport: Filesystem "
                "with deltas: Never"
            )
        return self._new_folder(version, buckets)

    def follow(self, version: int, buckets: Sequence[Bucket]) -> tuple[Path, Path]:
        """Return the folder of the current version and a new folder for the next version.

        Files are moved or replaced one by one, so memory contains at most one version plus a few buckets. The current version is no longer
        complete afterwards.

        Raises:
            NoRoomError: there is no current version.
        """
        if self.whole is None:
            raise NoRoomError(f"the base of version {version} is no longer in {self._memory}")
        before = self.whole.folder.rename(self._own() / f"v{version}.base")
        self.whole = None
        return before, self._new_folder(version, buckets)

    def settle(self, folder: Path, checksum: int) -> None:
        """Record the version in the folder as complete and verified; delete all other versions."""
        self.whole = Whole(folder, checksum)
        for path in self._own().glob("v*"):
            if path != folder:
                shutil.rmtree(path, ignore_errors=True)

    def _new_folder(self, version: int, buckets: Sequence[Bucket]) -> Path:
        folder = self._own() / f"v{version}"
        folder.mkdir()
        size = sum(bucket.size + len(bucket.header()) for bucket in buckets)
        names = {slot.tensor.name: file_name(bucket, len(buckets)) for bucket in buckets for slot in bucket.slots}
        (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": size}, "weight_map": names}))
        return folder

    def drop_all(self) -> None:
        """Delete all versions."""
        self.whole = None
        if self._folder is not None:
            for path in self._folder.glob("v*"):
                shutil.rmtree(path, ignore_errors=True)

    def close(self) -> None:
        """Delete the folder of this process."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
        self._folder = self._lock = self.whole = None

    def _own(self) -> Path:
        """Return the folder of this process; on first use, delete folders of processes that have ended."""
        if self._folder is None:
            for path in self._memory.glob(f"{_PREFIX}*"):
                _remove_if_left(path)
            new = Path(tempfile.mkdtemp(prefix=f".{_PREFIX}", dir=self._memory))
            self._lock = os.open(new / _LOCK, os.O_CREAT | os.O_RDWR, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            # The final name appears only after the lock is taken, so other processes never see an unlocked folder in use.
            self._folder = new.rename(new.with_name(new.name.removeprefix(".")))
        return self._folder


def file_name(bucket: Bucket, count: int) -> str:
    """Return the file name of a bucket of `count`."""
    return f"model-{bucket.index + 1:05d}-of-{count:05d}.safetensors"


def make_file(path: Path, bucket: Bucket) -> tuple[mmap.mmap, int]:
    """Create a bucket's file with its header; returns the mapped memory and the offset of the body.

    Raises:
        NoRoomError: the shared memory is full.
    """
    header = bucket.header()
    size = len(header) + bucket.size
    with path.open("w+b") as file:
        try:
            os.posix_fallocate(file.fileno(), 0, size)  # allocate now: a page that is missing later would raise SIGBUS
        except OSError as error:
            raise NoRoomError(
                f"{path.parent.parent} has no space for a bucket of {_show_gib(size)}: {error.strerror}"
            ) from None
        file.write(header)
        file.flush()
        return mmap.mmap(file.fileno(), size), len(header)


def _remove_if_left(path: Path) -> None:
    try:
        lock = os.open(path / _LOCK, os.O_RDWR)
    except OSError:  # folder of another user
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(path, ignore_errors=True)
    except OSError:  # its process is alive
        pass
    finally:
        os.close(lock)


def _show_gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
