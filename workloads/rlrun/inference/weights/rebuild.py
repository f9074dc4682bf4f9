"""One bucket's file of a new version in shared memory, built from the previous version's file and differences. Without torch.

The previous file is never written to: a process that has mapped it still sees the old content. It is deleted as soon as the new file has
the trainer's checksum.
"""

from __future__ import annotations

import mmap
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from rlrun.inference.weights.staging import make_file
from rlrun.protocol.messages.buckets import Bucket
from rlrun.protocol.messages.sparse import Bytes, DeltaError, apply_difference


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
