"""One bucket's file of a new version in shared memory, made from the file of the version before and what differs. Without torch.

The file of the version before is never written to: whoever has it mapped still sees what it was. It is removed as soon as the new one
has the trainer's checksum.
"""

from __future__ import annotations

import mmap
import zlib
from pathlib import Path

import numpy as np

from rlrun.inference.weights.staging import make_file
from rlrun.protocol.messages.buckets import Bucket
from rlrun.protocol.messages.sparse import Bytes, DeltaError, apply


class DamagedError(Exception):
    """A bucket is not what the trainer has."""


def compare(bucket: Bucket, body: Bytes, expected: int) -> None:
    """Insist on the trainer's checksum.

    Raises:
        DamagedError: the body has another one.
    """
    found = zlib.crc32(body)
    if found != expected:
        raise DamagedError(f"{_about(bucket)} has checksum {found:08x}, the trainer's {expected:08x}")


def keep(source: Path, target: Path, bucket: Bucket, expected: int) -> None:
    """Move the file of a bucket that is unchanged.

    Raises:
        DamagedError: it is not what the trainer has.
    """
    source.rename(target)
    compare(bucket, read_body(target, bucket), expected)


def replace(source: Path, target: Path, bucket: Bucket, delta: Bytes, expected: int) -> None:
    """Make a bucket's file from the one before and what differs.

    Args:
        source: file of the version before; it is gone afterwards.
        target: file of the new version.
        bucket: the same in both.
        delta: see `sparse.encode`.
        expected: CRC-32 of the new version's.

    Raises:
        DamagedError: the result is not what the trainer has.
        NoRoomError: the memory is used up.
    """
    memory, start = make_file(target, bucket)
    body = np.frombuffer(memory, np.uint8, bucket.size, start)
    body[:] = read_body(source, bucket)
    try:
        apply(delta, body)
    except DeltaError as error:
        raise DamagedError(f"{_about(bucket)}: {error}") from None
    compare(bucket, body, expected)
    source.unlink()


def read_body(path: Path, bucket: Bucket) -> Bytes:
    """The body of a bucket's file, mapped and not to be written to.

    Raises:
        DamagedError: the file is of another bucket.
    """
    header = bucket.header()
    with path.open("rb") as file:
        if file.read(len(header)) != header or file.seek(0, 2) != len(header) + bucket.size:
            raise DamagedError(f"{_about(bucket)}: {path} is of another version's layout")
        if not bucket.size:
            return np.empty(0, np.uint8)
        memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    return np.frombuffer(memory, np.uint8, bucket.size, len(header))


def _about(bucket: Bucket) -> str:
    return f"bucket {bucket.index} ({bucket.slots[0].tensor.name} and what follows)"
