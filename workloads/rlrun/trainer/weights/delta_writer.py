"""Versions on the volume as differences from the previous version, between complete versions. All ranks call each method together.

The root ranks keep their part of the last version in host memory. A version becomes the base of the next one only after it is completely
written, so a version that the volume refused is compared again.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor, nn

from rlrun.config.models.model import DType
from rlrun.protocol.files.durable import fsync_path
from rlrun.protocol.files.paths import RunPaths
from rlrun.protocol.messages.buckets import plan_buckets, root_ranks
from rlrun.protocol.messages.delta_files import MANIFEST, DeltaFiles, root_file
from rlrun.trainer.ranks.group import Group
from rlrun.trainer.weights.bucketing import bucket_layout, gather_buckets
from rlrun.trainer.weights.differences import About, Part, compare_buckets, in_order, version_difference
from rlrun.trainer.weights.hf_writer import new_version

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
        kept = gather_buckets(
            self._module, self._buckets, dtype=self._dtype, root=self._root, pinned=False, roots=self._roots
        )
        last = self._last
        part = compare_buckets(kept, None if last is None else last.kept)
        about = About.from_part(part, None if last is None else last.part)
        parts = [About.parse(self._group.broadcast(about.dump(), root=rank)) for rank in self._roots]
        size = sum(tensor.size for tensor in self._tensors)
        found = version_difference(parts, size)
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
        with new_version(path, self._group) as (unfinished, together), together.part():
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

    def written(self, version: Compared, *, whole: bool) -> None:
        """Set a version on the volume as the base of the next one."""
        self._last = replace(version, part=replace(version.part, travels={}))  # free the written bytes
        if whole:
            self._last_whole = version.step

    def _whole_name(self, step: int) -> str:
        return self._paths.version(step, self._attempt).name
