"""A version on the volume as what differs from the version before: a folder beside the whole ones, for engines alone.

    weights/v00000016.a0001   a whole version, a model folder that transformers and vLLM load
    weights/d00000017.a0001   what differs from it: delta.json, root-00000.bin (of each root, its buckets' differences one after the other)
    weights/d00000018.a0001   what differs from version 17

An engine that has version 17 in its shared memory applies the last one. Any other reads the newest whole version and all differences since.
Checksums alone say which version an engine has: after a restart a number may stand for other bits.
"""

from __future__ import annotations

from pathlib import Path

from rlrun.config.base import Config
from rlrun.protocol.messages.buckets import Bucket, TensorInfo, plan_buckets, version_checksum

MANIFEST = "delta.json"


class DeltaFiles(Config):
    """Content of `delta.json`."""

    version: int
    """The policy version."""
    tensors: list[TensorInfo]
    """Tensors of the version; with the next two fields they give the buckets."""
    bucket_bytes: int
    """Bound of one bucket, see `plan_buckets`."""
    roots: int
    """Number of files."""
    checksums: list[int]
    """CRC-32 of each whole bucket of the version, in order."""
    sizes: list[int]
    """Bytes in the files of each bucket; see `Difference.sizes`."""
    base: int
    """Checksum of the version before."""
    before: str | None
    """Folder of what makes the version before from its own one before; None: there is none."""
    whole_base: str | None
    """Folder that is the version before; None: it is not written whole."""
    whole: str | None
    """Folder that is this version; None: it is not written whole."""

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
        """Buckets of the version."""
        return plan_buckets(self.tensors, bucket_bytes=self.bucket_bytes, roots=self.roots)

    def places(self) -> list[tuple[str, int]]:
        """File and first byte of what differs in each bucket."""
        ends = [0] * self.roots
        found = []
        for bucket in self.buckets():
            found.append((root_file(bucket.root), ends[bucket.root]))
            ends[bucket.root] += self.sizes[bucket.index]
        return found


def is_delta(folder: Path) -> bool:
    """True if a published folder is what differs from the version before."""
    return (folder / MANIFEST).is_file()


def root_file(root: int) -> str:
    """Name of a root's file."""
    return f"root-{root:05d}.bin"


def read_manifest(folder: Path) -> DeltaFiles:
    """The manifest of a folder.

    Raises:
        ValueError: it is missing, or damaged; says which folder.
    """
    path = folder / MANIFEST
    try:
        found = DeltaFiles.model_validate_json(path.read_bytes())
        count = len(found.buckets())
    except (OSError, ValueError) as error:  # pydantic's are ValueErrors
        reason = str(error).splitlines()[0]
        raise ValueError(f"{path} cannot be read, or is damaged: {reason}") from None
    if not len(found.checksums) == len(found.sizes) == count:
        raise ValueError(f"{path} is damaged: it has {len(found.sizes)} sizes of {count} buckets")
    return found
