"""Differences between a version's buckets and the previous version's, for the network or for files on the volume.

On the volume, differences are written between complete versions. All ranks call each method of the writer together. The root ranks keep
their part of the last version in host memory. A version becomes the base of the next one only after it is completely written, so a version
that the volume refused is compared again.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from torch import Tensor, nn

from rlrun.config.models.language_models import DType
from rlrun.protocol.files.durable import fsync_path
from rlrun.protocol.files.paths import RunPaths
from rlrun.protocol.messages.buckets import MANIFEST, DeltaFiles, plan_buckets, root_file, root_ranks, version_checksum
from rlrun.protocol.messages.packed_columns import Bytes, encode_difference
from rlrun.protocol.messages.trainer_channel import Difference
from rlrun.trainer.ranks.group import Group
from rlrun.trainer.weights.bucketing import bucket_layout, gather_buckets
from rlrun.trainer.weights.hf_writer import new_version

WORTH = 0.5
"""Largest size of a difference, as a fraction of a bucket and of a version; larger ones are sent completely."""
THREADS = 4


@dataclass(frozen=True)
class Part:
    """Checksums and differences of a rank's buckets of a version, by index."""

    checksums: Mapping[int, int]
    """CRC-32 of each bucket."""
    compared: bool
    """Whether the buckets were compared with a previous version of the same layout."""
    travels: Mapping[int, Bytes]
    """Bytes for engines with the previous version: a difference, nothing (unchanged), or the complete bucket. Empty without a
    comparison.
    """

    @property
    def sizes(self) -> dict[int, int]:
        """Bytes of each entry of `travels`."""
        return {index: len(content) for index, content in self.travels.items()}


@dataclass(frozen=True)
class About:
    """Checksums and sizes of a root's part of a version, reported to rank 0. Keys are indices of buckets."""

    checksums: dict[int, int]
    """CRC-32 of each bucket."""
    base: dict[int, int] | None
    """Checksums of the previous version, or None without a comparison."""
    sizes: dict[int, int]
    """Bytes of each bucket to send to engines with the previous version, see `Difference.sizes`. Empty without a comparison."""

    @classmethod
    def from_part(cls, part: Part, before: Part | None) -> About:
        """Describe a part that was compared with the previous one."""
        compared = before is not None and part.compared
        return cls(
            dict(part.checksums), dict(before.checksums) if compared and before is not None else None, part.sizes
        )

    @classmethod
    def parse(cls, content: str | bytes) -> About:
        """Parse the result of `dump`."""
        found = json.loads(content)
        by_index = {
            name: None if part is None else {int(index): value for index, value in part.items()}
            for name, part in found.items()
        }
        return cls(by_index["checksums"] or {}, by_index["base"], by_index["sizes"] or {})

    def dump(self) -> str:
        """Return the JSON text for the store."""
        return json.dumps(asdict(self))


def compare_buckets(new: Mapping[int, Tensor], base: Mapping[int, Tensor] | None) -> Part:
    """Compute checksums of a version's buckets and, with a base, the differences from it.

    Args:
        new: buckets by index, uint8 in host memory.
        base: buckets of the previous version; None or another layout disables the comparison.
    """
    # Buckets of another layout cannot be compared byte by byte.
    if base is not None and _tensor_sizes(base) != _tensor_sizes(new):
        base = None

    def compare(index: int) -> tuple[int, Bytes | None]:
        body: Bytes = new[index].numpy()
        found = zlib.crc32(body.data)
        if base is None:
            return found, None
        delta = encode_difference(base[index].numpy(), body, most=int(WORTH * len(body)))
        return found, body if delta is None else delta

    # zlib and numpy release the GIL, so threads use several cores.
    with ThreadPoolExecutor(THREADS) as pool:
        done = dict(zip(new, pool.map(compare, new), strict=True))
    checksums = {index: crc for index, (crc, _) in done.items()}
    travels = {index: content for index, (_, content) in done.items() if content is not None}
    return Part(checksums, base is not None, travels)


def _tensor_sizes(buckets: Mapping[int, Tensor]) -> dict[int, int]:
    return {index: body.numel() for index, body in buckets.items()}


def in_order(parts: Sequence[Mapping[int, int]]) -> list[int]:
    """Merge the values of all roots' buckets into a list in the order of the buckets."""
    found = {index: value for part in parts for index, value in part.items()}
    return [found[index] for index in range(len(found))]


def version_difference(parts: Sequence[About], whole: int) -> Difference | None:
    """Return the difference from the previous version, or None if a root lacks it or it is too large for a version of `whole` bytes."""
    bases = [part.base for part in parts if part.base is not None]
    sent = sum(sum(part.sizes.values()) for part in parts)
    if len(bases) != len(parts) or sent > WORTH * whole:
        return None
    return Difference(base=version_checksum(in_order(bases)), sizes=in_order([part.sizes for part in parts]))


WHOLE_EVERY = 16
"""Maximum distance between complete versions, which limits the bytes that an engine without the base reads."""


@dataclass(frozen=True)
class Compared:
    """Version that is not written yet."""

    step: int
    kept: dict[int, Tensor]
    """Buckets of this root, by index."""
    part: Part
    about: DeltaFiles | None
    """Description of the difference, or None if the version is written completely: there is no base, or the difference is too large."""
    size: int
    """Bytes of the complete version."""

    @property
    def sent(self) -> int:
        """Bytes that an engine with the previous version reads."""
        return self.size if self.about is None else self.about.sent


class DeltaWriter:
    """Writer of the differences of one attempt.

    Args:
        module: policy.
        dtype: number format of the files.
        paths: paths of the run.
        attempt: number of the attempt.
        group: all ranks.
        bucket_bytes: largest size of a bucket.
    """

    def __init__(
        self,
        module: nn.Module,
        dtype: DType,
        *,
        paths: RunPaths,
        attempt: int,
        group: Group,
        bucket_bytes: int,
    ) -> None:
        self._module, self._dtype, self._group, self._bucket_bytes = module, dtype, group, bucket_bytes
        self._paths, self._attempt = paths, attempt
        self._roots = root_ranks(group.world_size)
        self._root = self._roots.index(group.rank) if group.rank in self._roots else None
        self._tensors = bucket_layout(module, dtype)
        self._buckets = plan_buckets(self._tensors, bucket_bytes=bucket_bytes, roots=len(self._roots))
        self._last: Compared | None = None
        self._last_whole: int | None = None
        """Step of the newest complete version."""

    def compare(self, step: int) -> Compared:
        """Copy the current parameters and compare them with the last version."""
        last = self._last
        kept = gather_buckets(
            self._module,
            self._buckets,
            dtype=self._dtype,
            root=self._root,
            pinned=False,
            roots=self._roots,
            earlier=None if last is None else last.kept,
        )
        part = compare_buckets(kept, None if last is None else last.kept)
        about = About.from_part(part, None if last is None else last.part)
        # All ranks get the same facts, so all of them decide alike whether a difference is written.
        parts = [About.parse(self._group.broadcast(about.dump(), root=rank)) for rank in self._roots]
        size = sum(tensor.size for tensor in self._tensors)
        found = version_difference(parts, size)
        # Without a base, or with a difference that saves too little, engines read the complete
        # version.
        if found is None or last is None:
            return Compared(step, kept, part, None, size)
        files = DeltaFiles(
            version=step,
            tensors=self._tensors,
            bucket_bytes=self._bucket_bytes,
            roots=len(self._roots),
            checksums=in_order([one.checksums for one in parts]),
            sizes=found.sizes,
            base=found.base,
            before=None if last.about is None else self._paths.delta(last.step, self._attempt).name,
            whole_base=self._whole_name(last.step) if self._last_whole == last.step else None,
            whole=None,
        )
        return Compared(step, kept, part, files, size)

    def whole_due(self, version: Compared) -> bool:
        """Return whether a version must be written completely for the differences."""
        return version.about is None or self._last_whole is None or version.step - self._last_whole >= WHOLE_EVERY

    def write(self, version: Compared, *, whole: bool) -> Path:
        """Write the difference and return its folder.

        Args:
            version: result of `compare` with a difference.
            whole: true if the complete version is written too; it must be finished.

        Raises:
            RefusedError: the volume is full or read-only for at least one rank; raised on all ranks, after the files are deleted.
        """
        assert version.about is not None
        path = self._paths.delta(version.step, self._attempt)
        with new_version(path, self._group) as (unfinished, together), together.catch_refusal():
            if self._root is not None:
                file = unfinished / root_file(self._root)
                with file.open("wb") as stream:
                    for index in sorted(version.part.travels):
                        stream.write(version.part.travels[index].data)
                fsync_path(file)
            if self._group.leads:
                name = self._whole_name(version.step) if whole else None
                about = version.about.model_copy(update={"whole": name})
                (unfinished / MANIFEST).write_text(about.model_dump_json() + "\n")
        return path

    def set_base(self, version: Compared, *, whole: bool) -> None:
        """Set a version on the volume as the base of the next one."""
        # Only a version that is on the volume becomes a base: an engine cannot apply a difference
        # from a version that it could not read.
        self._last = replace(version, part=replace(version.part, travels={}))  # free the written bytes
        if whole:
            self._last_whole = version.step

    def _whole_name(self, step: int) -> str:
        return self._paths.version(step, self._attempt).name
