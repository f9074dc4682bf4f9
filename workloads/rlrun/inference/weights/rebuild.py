"""One bucket's file of a new version in shared memory, made from the file of the version before and what differs. Without torch.

The file of the version before is never written to: whoever has it mapped still sees what it was. It is removed as soon as the new one
has the trainer's checksum.
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
    """A bucket is not what the trainer has."""


def compare_checksum(bucket: Bucket, body: Bytes, expected: int) -> None:
    """Insist on the trainer's checksum.

    Raises:
        DamagedError: the body has another one.
    """
    found = zlib.crc32(body.data)
    if found != expected:
        raise DamagedError(f"{_bucket_text(bucket)} has checksum {found:08x}, the trainer's {expected:08x}")


def replace_bucket(source: Path, target: Path, bucket: Bucket, sent: Sequence[Bytes], expected: int) -> None:
    """Make a bucket's file from the one of a version before.

    Args:
        source: file of that version; it is gone afterwards.
        target: file of the new version.
        bucket: the same in both.
        sent: what travels of the bucket for each version since, see `Difference.sizes`.
        expected: CRC-32 of the new version's.

    Raises:
        DamagedError: the result is not what the trainer has.
        NoRoomError: the memory is used up.
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
    """Make a bucket's file.

    Args:
        target: the file.
        bucket: what it holds.
        fill: puts the bucket of an older version into the body that it is given; not called where a newer one came whole.
        sent: see `replace_bucket`.
        expected: CRC-32 of the new version's.

    Raises:
        DamagedError: the result is not what the trainer has.
        NoRoomError: the memory is used up.
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
    """The body of a bucket's file, mapped and not to be written to.

    Raises:
        DamagedError: the file is of another bucket.
    """
    header = bucket.header()
    with path.open("rb") as file:
        if file.read(len(header)) != header or file.seek(0, 2) != len(header) + bucket.size:
            raise DamagedError(f"{_bucket_text(bucket)}: {path} is of another version's layout")
        if not bucket.size:
            return np.empty(0, np.uint8)
        memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    return np.frombuffer(memory, np.uint8, bucket.size, len(header))


def _bucket_text(bucket: Bucket) -> str:
    return f"bucket {bucket.index} ({bucket.slots[0].tensor.name} and what follows)"
