"""Buckets in which a version of the weights is sent, and versions that are stored as differences.

The plan of the buckets is pure: the place of each tensor, the sending ranks, and the costs. Both sides compute the same buckets from the
list of tensors, so that only this list is sent. A bucket is the body of a safetensors file: an engine loads received buckets like a
published folder.

The difference of a version from the previous version is a folder on the volume next to the complete versions, for engines only:

    weights/v00000016.a0001   complete version, a model folder that transformers and vLLM load
    weights/d00000017.a0001   its difference from version 16: delta.json, root-00000.bin (per root, the differences of its buckets in order)
    weights/d00000018.a0001   difference from version 17

An engine with version 17 in its shared memory applies only the last one. Any other engine reads the newest complete version and all
differences since. Only checksums identify an engine's version: after a restart, a number may stand for other bits.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlrun.config.base import Config

BUCKET_BYTES = 256 * 1024**2
"""Maximum size of a bucket: large enough for the full speed of a link, small enough to be complete in a rank's memory."""
MAX_ROOTS = 8
"""Maximum number of sending trainer ranks: each has a group with all engines, and each group costs memory."""
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
    """Full shape, not that of a shard."""

    @property
    def size(self) -> int:
        """Size in bytes.

        Raises:
            ValueError: safetensors files do not support the number format.
        """
        if self.dtype not in _SAFETENSORS:
            raise ValueError(f"{self.name} is of type {self.dtype}, which safetensors files do not support")
        return _SAFETENSORS[self.dtype][1] * math.prod(self.shape)


@dataclass(frozen=True)
class Slot:
    """Place of a tensor in its bucket."""

    tensor: TensorInfo
    offset: int
    """Offset of the first byte."""

    @property
    def end(self) -> int:
        """Offset after the last byte."""
        return self.offset + self.tensor.size


@dataclass(frozen=True)
class Bucket:
    """Tensors that are sent together."""

    index: int
    """Position in the published order."""
    root: int
    """Number of the sending root."""
    slots: tuple[Slot, ...]

    @property
    def size(self) -> int:
        """Size in bytes."""
        return self.slots[-1].end

    def header(self) -> bytes:
        """Return the header of the safetensors file whose body is this bucket; a multiple of 8 bytes."""
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
    """Return the buckets of a version, in their published order.

    Args:
        tensors: tensors in order; a bucket contains consecutive ones of the same number format.
        bucket_bytes: maximum size of a bucket; a larger tensor gets its own bucket.
        roots: number of sending ranks; a bucket goes to the rank with the fewest bytes so far.

    Raises:
        ValueError: safetensors files do not support the number format of a tensor.
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
    """Return the ranks of the trainer that are roots, spread over its machines; the first is rank 0."""
    count = min(world_size, MAX_ROOTS)
    return [number * world_size // count for number in range(count)]


def version_checksum(checksums: Iterable[int]) -> int:
    """Return the checksum of a version: CRC-32 over the checksums of its buckets, so that it depends on their order."""
    return zlib.crc32(b"".join(one.to_bytes(4, "little") for one in checksums))


@dataclass(frozen=True)
class Estimate:
    """Calculated costs of one transfer; nothing is measured."""

    total: int
    """Bytes of the version."""
    buckets: int
    """Number of buckets."""
    largest: int
    """Size of the largest bucket in bytes: the maximum that is complete on a rank that does not keep it."""
    kept: int
    """Bytes of one version on the root with the largest part."""
    seconds: float
    """Seconds from the first byte to the last, for any number of engines: receivers of a broadcast forward it while they receive it."""


def estimate_hand_over(
    buckets: Sequence[Bucket],
    *,
    send_bytes_per_second: float,
    receive_bytes_per_second: float,
    seconds_per_bucket: float = 0.0,
) -> Estimate:
    """Return bytes, memory and time of a transfer.

    Args:
        buckets: buckets of the version, at least one.
        send_bytes_per_second: speed of one root's link; roots send concurrently.
        receive_bytes_per_second: speed of an engine's link.
        seconds_per_bucket: latency of one broadcast; those of a root are sequential.
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


MANIFEST = "delta.json"


class DeltaFiles(Config):
    """Content of `delta.json`."""

    version: int
    """Policy version."""
    tensors: list[TensorInfo]
    """Tensors of the version; with the next two fields they determine the buckets."""
    bucket_bytes: int
    """Maximum size of one bucket, see `plan_buckets`."""
    roots: int
    """Number of files."""
    checksums: list[int]
    """CRC-32 of each complete bucket of the version, in order."""
    sizes: list[int]
    """Bytes of each bucket in the files; see `Difference.sizes`."""
    base: int
    """Checksum of the previous version."""
    before: str | None
    """Folder with the difference that produced the previous version, or None."""
    whole_base: str | None
    """Folder with the complete previous version, or None."""
    whole: str | None
    """Folder with this version completely, or None."""

    @property
    def checksum(self) -> int:
        """Checksum of the version."""
        return version_checksum(self.checksums)

    @property
    def sent(self) -> int:
        """Bytes of the differences."""
        return sum(self.sizes)

    @property
    def size(self) -> int:
        """Bytes of the version."""
        return sum(tensor.size for tensor in self.tensors)

    def buckets(self) -> list[Bucket]:
        """Return the buckets of the version."""
        return plan_buckets(self.tensors, bucket_bytes=self.bucket_bytes, roots=self.roots)

    def places(self) -> list[tuple[str, int]]:
        """Return file and first byte of each bucket's difference."""
        ends = [0] * self.roots
        found = []
        for bucket in self.buckets():
            found.append((root_file(bucket.root), ends[bucket.root]))
            ends[bucket.root] += self.sizes[bucket.index]
        return found


def is_delta(folder: Path) -> bool:
    """Return whether a published folder contains a difference from the previous version."""
    return (folder / MANIFEST).is_file()


def root_file(root: int) -> str:
    """Return the name of a root's file."""
    return f"root-{root:05d}.bin"


def read_manifest(folder: Path) -> DeltaFiles:
    """Return the manifest of a folder.

    Raises:
        ValueError: it is missing or damaged; the message names the folder.
    """
    path = folder / MANIFEST
    try:
        found = DeltaFiles.model_validate_json(path.read_bytes())
        count = len(found.buckets())
    except (OSError, ValueError) as error:  # pydantic's are ValueErrors
        reason = str(error).splitlines()[0]
        raise ValueError(f"cannot read {path}, or it is damaged: {reason}") from None
    if not len(found.checksums) == len(found.sizes) == count:
        raise ValueError(f"{path} is damaged: it has {len(found.sizes)} sizes for {count} buckets")
    return found
