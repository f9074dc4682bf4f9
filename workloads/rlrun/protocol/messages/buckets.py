"""Buckets that a version of the weights travels in: which tensor lies where, which rank sends it, and what that costs. Pure.

Both ends compute the same buckets from the list of tensors, so only that list is sent. A bucket is the body of a safetensors file: what an
engine receives it loads like a published folder.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rlrun.config.base import Config

BUCKET_BYTES = 256 * 1024**2
"""Bound of a bucket: large enough for the full speed of a link, small enough to be whole on a rank."""
MAX_ROOTS = 8
"""Most ranks of the trainer that send: each has a group with all engines, and each group costs memory."""
_SAFETENSORS = {
    "float64": ("F64", 8),
    "float32": ("F32", 4),
    "bfloat16": ("BF16", 2),
    "float16": ("F16", 2),
    "int64": ("I64", 8),
    "int32": ("I32", 4),
    "int16": ("I16", 2),
    "int8": ("I8", 1),
    "uint8": ("U8", 1),
    "bool": ("BOOL", 1),
    "float8_e4m3fn": ("F8_E4M3", 1),
    "float8_e5m2": ("F8_E5M2", 1),
}


class TensorInfo(Config):
    """One tensor of a version."""

    name: str
    """Name as in the files of a published version."""
    dtype: str
    """torch's name of the number format, such as `bfloat16`."""
    shape: list[int]
    """Whole, not of a shard."""

    @property
    def size(self) -> int:
        """Bytes.

        Raises:
            ValueError: no file can hold the number format.
        """
        if self.dtype not in _SAFETENSORS:
            raise ValueError(f"{self.name} is of type {self.dtype}, which safetensors files do not hold")
        return _SAFETENSORS[self.dtype][1] * math.prod(self.shape)


@dataclass(frozen=True)
class Slot:
    """Place of a tensor in its bucket."""

    tensor: TensorInfo
    offset: int
    """First byte."""

    @property
    def end(self) -> int:
        """Byte after the last."""
        return self.offset + self.tensor.size


@dataclass(frozen=True)
class Bucket:
    """Tensors that are sent together."""

    index: int
    """Place in the published order."""
    root: int
    """Number of the root that sends it."""
    slots: tuple[Slot, ...]

    @property
    def size(self) -> int:
        """Bytes."""
        return self.slots[-1].end

    def header(self) -> bytes:
        """Head of the safetensors file whose body the bucket is; a multiple of 8 bytes."""
        table: dict[str, object] = {
            slot.tensor.name: {
                "dtype": _SAFETENSORS[slot.tensor.dtype][0],
                "shape": slot.tensor.shape,
                "data_offsets": [slot.offset, slot.end],
            }
            for slot in self.slots
        }
        text = json.dumps({"__metadata__": {"format": "pt"}} | table, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text


def plan_buckets(tensors: Sequence[TensorInfo], *, bucket_bytes: int = BUCKET_BYTES, roots: int = 1) -> list[Bucket]:
    """Buckets of a version, in their published order.

    Args:
        tensors: in order; a bucket holds consecutive ones of the same number format.
        bucket_bytes: most bytes of a bucket; a larger tensor is a bucket of its own.
        roots: number of ranks that send; a bucket goes to the one that has least so far.

    Raises:
        ValueError: a tensor has a number format that files do not hold.
    """
    runs: list[list[Slot]] = []
    for tensor in tensors:
        last, size = runs[-1][-1] if runs else None, tensor.size
        fits = last is not None and last.tensor.dtype == tensor.dtype and last.end + size <= bucket_bytes
        if last is None or not fits:
            runs.append([Slot(tensor, 0)])
        else:
            runs[-1].append(Slot(tensor, last.end))
    loads = [0] * roots
    buckets = []
    for index, slots in enumerate(runs):
        root = loads.index(min(loads))
        buckets.append(Bucket(index, root, tuple(slots)))
        loads[root] += buckets[-1].size
    return buckets


def root_ranks(world_size: int) -> list[int]:
    """Ranks of the trainer that are roots, spread over its machines; the first is rank 0."""
    count = min(world_size, MAX_ROOTS)
    return [number * world_size // count for number in range(count)]


def version_checksum(checksums: Iterable[int]) -> int:
    """Checksum of a version: CRC-32 of those of its buckets, in order, so that buckets in another order have another one."""
    return zlib.crc32(b"".join(one.to_bytes(4, "little") for one in checksums))


@dataclass(frozen=True)
class Estimate:
    """Arithmetic of one hand-over; nothing of it is measured."""

    total: int
    """Bytes of the version."""
    buckets: int
    """Number of buckets."""
    largest: int
    """Bytes of the largest bucket: the most that is whole on a rank that does not keep it."""
    kept: int
    """Bytes of one version on the root that has most of it."""
    seconds: float
    """Time from the first byte to the last, for any number of engines: a broadcast is passed on while it comes in."""


def estimate_hand_over(
    buckets: Sequence[Bucket],
    *,
    send_bytes_per_second: float,
    receive_bytes_per_second: float,
    seconds_per_bucket: float = 0.0,
) -> Estimate:
    """Bytes, memory and time of a hand-over.

    Args:
        buckets: of the version, one or more.
        send_bytes_per_second: of the link of one root; roots send at the same time.
        receive_bytes_per_second: of the link of an engine.
        seconds_per_bucket: latency of one broadcast; those of a root follow each other.
    """
    kept: dict[int, int] = {}
    counts: dict[int, int] = {}
    for bucket in buckets:
        kept[bucket.root] = kept.get(bucket.root, 0) + bucket.size
        counts[bucket.root] = counts.get(bucket.root, 0) + 1
    total, most = sum(kept.values()), max(kept.values())
    moving = max(most / send_bytes_per_second, total / receive_bytes_per_second)
    return Estimate(
        total=total,
        buckets=len(buckets),
        largest=max(bucket.size for bucket in buckets),
        kept=most,
        seconds=moving + max(counts.values()) * seconds_per_bucket,
    )
