"""Difference of a version from the previous version, on the volume: a folder next to the complete versions, for engines only.

    weights/v00000016.a0001   complete version, a model folder that transformers and vLLM load
    weights/d00000017.a0001   its difference from version 16: delta.json, root-00000.bin (per root, the differences of its buckets in order)
    weights/d00000018.a0001   difference from version 17

An engine with version 17 in its shared memory applies only the last one. Any other engine reads the newest complete version and all
differences since. Only checksums identify an engine's version: after a restart, a number may stand for other bits.
"""

from __future__ import annotations

from pathlib import Path

from rlrun.config.base import Config
from rlrun.protocol.messages.buckets import Bucket, TensorInfo, plan_buckets, version_checksum

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
