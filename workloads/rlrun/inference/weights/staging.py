"""Shared memory of an engine's machine, where a version is put together before the engine is touched.

A version there is a folder of safetensors files, one for each bucket, which the workers load as they load a published one: each reads what
it needs, and the version lies there once for all of them.
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

SHARED_MEMORY = Path("/dev/shm")  # the folder of this process in it is its own
_PREFIX, _LOCK = "rlrun-weights-", "lock"


@dataclass(frozen=True)
class Whole:
    """A version in shared memory."""

    folder: Path
    checksum: int
    """See `buckets.version_checksum`."""


class NoRoomError(Exception):
    """The version does not fit; says what to change."""


class Staging:
    """Folders for versions, in a folder of this process that goes with it. Used by one thread at a time.

    Args:
        memory: a folder in memory; default: the machine's shared memory, or the folder for temporary files where there is none.
    """

    def __init__(self, memory: Path | None = None) -> None:
        self._memory = memory or (SHARED_MEMORY if SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir()))
        self._folder: Path | None = None
        self._lock: int | None = None
        self.whole: Whole | None = None
        """The version that lies here whole and verified, from which the next one may be made."""

    def open(self, version: int, buckets: Sequence[Bucket]) -> Path:
        """A folder with a file for each bucket, still without content, and the index.

        Raises:
            NoRoomError: they do not fit.
        """
        root = self._own()
        self.drop_all()
        size = sum(bucket.size + len(bucket.header()) for bucket in buckets)
        free = shutil.disk_usage(root).free
        if free < size:
            raise NoRoomError(
                f"version {version} needs {_show_gib(size)} of the engine's shared memory ({self._memory}), "
                f"and {_show_gib(free)} are free; "
                "raise inference.sharedMemory and the memory of the engine's container, or set weightSync.transport: Filesystem "
                "with deltas: Never"
            )
        return self._new_folder(version, buckets)

    def follow(self, version: int, buckets: Sequence[Bucket]) -> tuple[Path, Path]:
        """The folder of the version that lies here, and one for the next: files are moved or replaced one by one, so there is never more
        than one version, and a few buckets. The version that was here is whole no more.

        Raises:
            NoRoomError: there is none to follow.
        """
        if self.whole is None:
            raise NoRoomError(f"version {version} is to be made from one that is not in {self._memory} any more")
        before = self.whole.folder.rename(self._own() / f"v{version}.base")
        self.whole = None
        return before, self._new_folder(version, buckets)

    def settle(self, folder: Path, checksum: int) -> None:
        """The version in the folder is whole and verified; what is left of others is removed."""
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
        """Give the memory of all versions back."""
        self.whole = None
        if self._folder is not None:
            for path in self._folder.glob("v*"):
                shutil.rmtree(path, ignore_errors=True)

    def close(self) -> None:
        """Leave nothing behind."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
        self._folder = self._lock = self.whole = None

    def _own(self) -> Path:
        """This process's folder; those of processes that are gone are removed first."""
        if self._folder is None:
            for path in self._memory.glob(f"{_PREFIX}*"):
                _remove_if_left(path)
            new = Path(tempfile.mkdtemp(prefix=f".{_PREFIX}", dir=self._memory))
            self._lock = os.open(new / _LOCK, os.O_CREAT | os.O_RDWR, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            # Under this name other processes look for what was left, and find it locked.
            self._folder = new.rename(new.with_name(new.name.removeprefix(".")))
        return self._folder


def file_name(bucket: Bucket, count: int) -> str:
    """Name of a bucket's file, of `count`."""
    return f"model-{bucket.index + 1:05d}-of-{count:05d}.safetensors"


def make_file(path: Path, bucket: Bucket) -> tuple[mmap.mmap, int]:
    """Make a bucket's file, its head written; returns it as memory, and where its body begins.

    Raises:
        NoRoomError: the memory is used up.
    """
    header = bucket.header()
    size = len(header) + bucket.size
    with path.open("w+b") as file:
        try:
            os.posix_fallocate(file.fileno(), 0, size)  # a page that is missing later would be a SIGBUS
        except OSError as error:
            raise NoRoomError(
                f"{path.parent.parent} has no room for a bucket of {_show_gib(size)}: {error.strerror}"
            ) from None
        file.write(header)
        file.flush()
        return mmap.mmap(file.fileno(), size), len(header)


def _remove_if_left(path: Path) -> None:
    try:
        lock = os.open(path / _LOCK, os.O_RDWR)
    except OSError:  # another user's
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(path, ignore_errors=True)
    except OSError:  # its process lives
        pass
    finally:
        os.close(lock)


def _show_gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
