"""Verification of a checkpoint by all ranks: each rank reads only the files that it will load.

If one machine read the whole checkpoint while the others wait, the check would take longer by a factor of the number of machines. After
the check, the files of a rank are in its machine's page cache for the load.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from rlrun.protocol.files.checkpoint_manifest import FileEntry, Manifest, ManifestError, check_sizes, check_sums

_SHARD = re.compile(r"/__(\d+)_\d+\.distcp$")
"""Name of a rank's file."""
_LOOK_SECONDS = 0.2


class Ranks(Protocol):
    """Required methods of a `Group`."""

    @property
    def rank(self) -> int:
        """Number of this rank."""

    @property
    def world_size(self) -> int:
        """Number of ranks."""

    @property
    def leads(self) -> bool:
        """Whether this is rank 0."""

    def broadcast(self, document: object, *, root: int = 0) -> Any:
        """Return the JSON document of one rank on every rank."""

    def max_over_ranks(self, values: Mapping[str, float]) -> dict[str, float]:
        """Return the maxima over all ranks."""


def share_files(files: Iterable[FileEntry], rank: int, world_size: int) -> list[FileEntry]:
    """Return the files that a rank checks: shards with its number, which it will load. Rank 0 also checks files that belong to no rank.

    Args:
        files: files of the checkpoint, written with any number of ranks.
        rank: number of the checking rank.
        world_size: number of checking ranks.
    """
    found = ((entry, _SHARD.search(entry.path)) for entry in files)
    return [entry for entry, shard in found if (int(shard[1]) if shard else 0) % world_size == rank]


class SharedCheck:
    """Check on every rank: rank 0 calls `verify_checkpoint` any number of times and then `finish_checks`; other ranks call only that.

    Args:
        group: all ranks.
        patience: seconds to wait for a file that rank 0 has seen, because network file systems cache missing entries.
    """

    def __init__(self, group: Ranks, patience: float = 60.0) -> None:
        self._group, self._patience = group, patience

    def verify_checkpoint(self, checkpoint: Path, manifest: Manifest) -> None:
        """Compare every file with its entry; called on rank 0 while the other ranks are in `finish_checks`.

        Raises:
            ManifestError: a file is missing, has another size or checksum, or cannot be read; the message contains its name.
        """
        # Sizes first, on rank 0 only: a missing or short file is found without reading any
        # content.
        check_sizes(checkpoint, manifest.files)
        entries = [asdict(entry) for entry in manifest.files]
        self._group.broadcast({"checkpoint": str(checkpoint), "files": entries})
        self._check_files(checkpoint, manifest.files)

    def finish_checks(self) -> None:
        """Serve checks for rank 0 until it has chosen a checkpoint."""
        if self._group.leads:
            self._group.broadcast({"checkpoint": None})
            return
        while (order := self._group.broadcast(None))["checkpoint"] is not None:
            try:
                self._check_files(Path(order["checkpoint"]), [FileEntry(**entry) for entry in order["files"]])
            except ManifestError:
                continue  # rank 0 has the same error and tries another checkpoint

    def _check_files(self, checkpoint: Path, files: Iterable[FileEntry]) -> None:
        """Check this rank's files; raises on all ranks together."""
        group, problem = self._group, ""
        try:
            self._read_files(checkpoint, share_files(files, group.rank, group.world_size))
        except ManifestError as error:
            problem = str(error)
        except OSError as error:
            problem = f"{checkpoint.name}: rank {group.rank} cannot read {error.filename}: [Errno {error.errno}] {error.strerror}"
        # All ranks must reject the same checkpoint; otherwise some would wait for the next check
        # and others for the attempt.
        worst = int(group.max_over_ranks({"rank": float(group.rank) if problem else -1.0})["rank"])
        if worst >= 0:
            raise ManifestError(group.broadcast(problem, root=worst))

    def _read_files(self, checkpoint: Path, files: Sequence[FileEntry]) -> None:
        deadline = time.monotonic() + self._patience
        while True:
            try:
                return check_sums(checkpoint, files)
            except FileNotFoundError:
                if time.monotonic() > deadline:
                    raise
            time.sleep(_LOOK_SECONDS)
            for folder in {(checkpoint / entry.path).parent for entry in files}:
                with suppress(OSError):
                    os.listdir(folder)  # noqa: PTH208  # forces a new lookup at the server
