"""Versions that are published as differences, rebuilt as whole versions in the machine's shared memory.

The base is the version in shared memory with all later differences; otherwise the newest whole version on the volume with all later
differences. Every bucket must have the trainer's checksum before the engine is changed. File format: `rlrun.protocol.messages.buckets`.

The previous version's file of a bucket is never written to: a process that has mapped it still has the old content. It is deleted as soon
as the new file has the trainer's checksum. Without torch: tensors are raw bytes, because numpy has no bfloat16.
"""

from __future__ import annotations

import json
import mmap
import threading
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from loguru import logger

from rlrun.inference.weights.preflight import FolderError, Shapes, problem_of_tensors
from rlrun.inference.weights.receive import NoRoomError, RefusedError, Staging, file_name, make_file
from rlrun.protocol.files.paths import COMPLETE
from rlrun.protocol.messages.buckets import Bucket, DeltaFiles, read_manifest
from rlrun.protocol.messages.packed_columns import Bytes, DeltaError, apply_difference


class StoredTensors:
    """Memory-mapped safetensors files of a folder.

    Args:
        folder: folder of a complete version.

    Raises:
        FolderError: a file is damaged.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._found: dict[str, Bytes] = {}
        for path in sorted(folder.glob("*.safetensors")):
            try:
                self._found |= _stored_tensors(path)
            except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
                raise FolderError(f"{path} is not a complete safetensors file: {error}") from None

    def fill(self, bucket: Bucket, body: Bytes) -> None:
        """Copy a bucket's tensors to their offsets in its body.

        Raises:
            FolderError: a tensor is missing, or has another size.
        """
        for slot in bucket.slots:
            name, found = slot.tensor.name, self._found.get(slot.tensor.name)
            if found is None or len(found) != slot.tensor.size:
                size = "no" if found is None else f"{len(found)}"
                raise FolderError(f"{self._folder} has {size} bytes of {name}, expected {slot.tensor.size}")
            body[slot.offset : slot.end] = found


def _stored_tensors(path: Path) -> dict[str, Bytes]:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > path.stat().st_size:
            raise ValueError("the header is longer than the file")
        header: dict[str, Any] = json.loads(file.read(length))
        memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    content = np.frombuffer(memory, np.uint8)[8 + length :]
    found: dict[str, Bytes] = {}
    for name, about in header.items():
        if name != "__metadata__":
            first, end = about["data_offsets"]
            found[name] = content[first:end]
    return found


class DamagedError(Exception):
    """Error for a bucket that differs from the trainer's."""


def compare_checksum(bucket: Bucket, body: Bytes, expected: int) -> None:
    """Check the trainer's checksum.

    Raises:
        DamagedError: the body has another checksum.
    """
    found = zlib.crc32(body.data)
    if found != expected:
        raise DamagedError(f"{_bucket_text(bucket)} has checksum {found:08x}, the trainer's {expected:08x}")


def replace_bucket(source: Path, target: Path, bucket: Bucket, sent: Sequence[Bytes], expected: int) -> None:
    """Build a bucket's file from the file of an older version.

    Args:
        source: file of the older version; deleted afterwards.
        target: file of the new version.
        bucket: layout of the bucket, which is equal in both versions.
        sent: data of the bucket for each later version: a difference or the whole bucket, see `Difference.sizes`.
        expected: CRC-32 of the bucket in the new version.

    Raises:
        DamagedError: the result differs from the trainer's bucket.
        NoRoomError: the shared memory is full.
    """
    if not any(len(one) for one in sent):
        source.rename(target)
        compare_checksum(bucket, read_body(target, bucket), expected)
        return

    def fill(body: Bytes) -> None:
        body[:] = read_body(source, bucket)

    make_bucket(target, bucket, fill, sent, expected)
    source.unlink()


def make_bucket(
    target: Path, bucket: Bucket, fill: Callable[[Bytes], None], sent: Sequence[Bytes], expected: int
) -> None:
    """Build a bucket's file.

    Args:
        target: file of the new version.
        bucket: layout of the bucket.
        fill: function that copies the bucket of an older version into a body; not called if `sent` contains the whole bucket.
        sent: see `replace_bucket`.
        expected: CRC-32 of the bucket in the new version.

    Raises:
        DamagedError: the result differs from the trainer's bucket.
        NoRoomError: the shared memory is full.
    """
    memory, start = make_file(target, bucket)
    body: Bytes = np.frombuffer(memory, np.uint8, bucket.size, start)
    whole = max((at for at, one in enumerate(sent) if len(one) == bucket.size), default=None)
    if whole is None:
        fill(body)
    else:
        body[:] = sent[whole]
    try:
        for one in sent[0 if whole is None else whole + 1 :]:
            apply_difference(one, body)
    except DeltaError as error:
        raise DamagedError(f"{_bucket_text(bucket)}: {error}") from None
    compare_checksum(bucket, body, expected)


def read_body(path: Path, bucket: Bucket) -> Bytes:
    """Return the body of a bucket's file as a read-only mapping.

    Raises:
        DamagedError: the file belongs to another bucket.
    """
    header = bucket.header()
    with path.open("rb") as file:
        if file.read(len(header)) != header or file.seek(0, 2) != len(header) + bucket.size:
            raise DamagedError(f"{_bucket_text(bucket)}: {path} has the layout of another version")
        if not bucket.size:
            return np.empty(0, np.uint8)
        memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    return np.frombuffer(memory, np.uint8, bucket.size, len(header))


def _bucket_text(bucket: Bucket) -> str:
    return f"bucket {bucket.index} ({bucket.slots[0].tensor.name} and following tensors)"


_THREADS = 4


@dataclass(frozen=True)
class _Link:
    """Folder with one difference."""

    folder: Path
    files: DeltaFiles

    def read_bucket(self, bucket: Bucket, place: tuple[str, int]) -> Bytes:
        """Return the bytes of one bucket."""
        size = self.files.sizes[bucket.index]
        if not size:
            return np.empty(0, np.uint8)
        with (self.folder / place[0]).open("rb") as file:
            file.seek(place[1])
            found: Bytes = np.frombuffer(file.read(size), np.uint8)
        if len(found) != size:
            raise DamagedError(f"{self.folder / place[0]} is incomplete")
        return found


class Rebuilder:
    """Builder of whole versions from differences.

    Args:
        expected: tensors of the served model, or None if unknown.
        staging: target of the versions. Default: the machine's shared memory.
    """

    def __init__(self, *, expected: Shapes | None, staging: Staging | None = None) -> None:
        self._expected, self._staging = expected, staging or Staging()
        self._lock = threading.Lock()

    def make(self, folder: Path) -> Path:
        """Build the version of a published folder and return its folder in shared memory, which stays until the next call.

        Args:
            folder: published folder with a difference.

        Raises:
            RefusedError: the version cannot be built; the engine is unchanged.
        """
        with self._lock:  # a call that timed out may still be running
            try:
                return self._build_version(folder)
            except (DamagedError, NoRoomError, FolderError, OSError, ValueError) as error:
                self._staging.drop_all()
                raise RefusedError(f"the version in {folder} cannot be built: {error}") from None

    def close(self) -> None:
        """Delete everything in shared memory."""
        self._staging.close()

    def _build_version(self, folder: Path) -> Path:
        held = self._staging.whole
        chain = _delta_chain(folder, None if held is None else held.checksum)
        target = chain[0].files
        problem = problem_of_tensors(target.tensors, self._expected)
        if problem is not None:
            raise FolderError(problem)
        if held is not None and held.checksum == target.checksum:
            return held.folder
        if held is not None and held.checksum == chain[-1].files.base:
            try:
                return self._from_memory(chain)
            except DamagedError as error:
                logger.warning(
                    f"version {target.version} cannot be built from memory: {error}; reading the whole version from the volume"
                )
                chain = _delta_chain(folder, None)
        return self._from_volume(chain)

    def _from_memory(self, links: Sequence[_Link]) -> Path:
        target = links[0].files
        base, folder = self._staging.open_next_version(target.version, target.buckets())

        def build_bucket(bucket: Bucket, path: Path, sent: Sequence[Bytes], expected: int) -> None:
            replace_bucket(base / path.name, path, bucket, sent, expected)

        return self._build_files(links, folder, build_bucket)

    def _from_volume(self, chain: Sequence[_Link]) -> Path:
        """Read the newest whole version and apply all later differences."""
        root, target = chain[0].folder.parent, chain[0].files
        # Choose the newest version in the chain that is also published whole; only the links after it have to be applied.
        whole, links = (target.whole, []) if target.whole else (None, list(chain))
        for count, link in enumerate(chain, start=1):
            if whole is None and link.files.whole_base is not None:
                whole, links = link.files.whole_base, list(chain[:count])
        if whole is None or not (root / whole / COMPLETE).is_file():
            raise RefusedError(
                f"{chain[0].folder} contains only differences of version {target.version}, and its whole base no longer exists",
                gone=True,
            )
        stored = StoredTensors(root / whole)

        def build_bucket(bucket: Bucket, path: Path, sent: Sequence[Bytes], expected: int) -> None:
            make_bucket(path, bucket, lambda body: stored.fill(bucket, body), sent, expected)

        self._staging.drop_all()
        folder = self._staging.open(target.version, target.buckets())
        return self._build_files(links, folder, build_bucket, target=target)

    def _build_files(
        self,
        links: Sequence[_Link],
        folder: Path,
        build_bucket: Callable[[Bucket, Path, Sequence[Bytes], int], None],
        *,
        target: DeltaFiles | None = None,
    ) -> Path:
        """Build the files of all buckets. `links` are the differences, newest first; `build_bucket` builds one."""
        files = target or links[0].files
        buckets, oldest_first = files.buckets(), [(link, link.files.places()) for link in reversed(links)]

        def read_and_build(bucket: Bucket) -> None:
            sent = [link.read_bucket(bucket, places[bucket.index]) for link, places in oldest_first]
            build_bucket(bucket, folder / file_name(bucket, len(buckets)), sent, files.checksums[bucket.index])

        with ThreadPoolExecutor(_THREADS) as pool:
            list(pool.map(read_and_build, buckets))
        self._staging.record_complete(folder, files.checksum)
        return folder


def _delta_chain(folder: Path, held: int | None) -> list[_Link]:
    """Return the differences from the newest back to one whose base is the version `held` (its checksum).

    Without such a base the chain ends at a whole version, or at the oldest difference that exists.

    Raises:
        ValueError: the newest difference is damaged. A damaged older one only ends the chain.
    """
    chain = [_Link(folder, read_manifest(folder))]
    while (newest := chain[-1].files).base != held and newest.before is not None:
        if held is None and newest.whole_base is not None:
            break
        before = folder.parent / newest.before
        try:
            link = _Link(before, read_manifest(before))
        except ValueError:
            break
        if link.files.tensors != newest.tensors or link.files.checksum != newest.base:
            break
        chain.append(link)
    return chain
