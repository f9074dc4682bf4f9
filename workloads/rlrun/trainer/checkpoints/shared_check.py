"""Check of a checkpoint by all ranks together: each reads the files that it is about to load, and the others' not at all.

One machine that reads the whole checkpoint alone, while the others wait, takes as many times as long as there are machines. And what
a rank has read for its checksum is in its machine's page cache when the checkpoint is loaded.
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
    """The part of a `Group` that this needs."""

    @property
    def rank(self) -> int:
        """Number of this rank."""

    @property
    def world_size(self) -> int:
        """Number of ranks."""

    @property
    def leads(self) -> bool:
        """True on rank 0."""

    def broadcast(self, document: object, *, root: int = 0) -> Any:
        """The JSON document of one rank, on every rank."""

    def maxima(self, values: Mapping[str, float]) -> dict[str, float]:
        """Maxima over all ranks."""


def share_files(files: Iterable[FileEntry], rank: int, world_size: int) -> list[FileEntry]:
    """Files that a rank checks: those of the rank of its number, which it loads; what is no rank's is rank 0's.

    Args:
        files: of the checkpoint, by whichever number of ranks it was written.
        rank: of `world_size`.
        world_size: ranks that check.
    """
    found = ((entry, _SHARD.search(entry.path)) for entry in files)
    return [entry for entry, shard in found if (int(shard[1]) if shard else 0) % world_size == rank]


class SharedCheck:
    """The check, on every rank: rank 0 calls `verify` as often as it likes, then all of them call `end`.

    Args:
        group: all ranks.
        patience: seconds that a file may be missing here which rank 0 has seen: a network file system remembers what was not there.
    """

    def __init__(self, group: Ranks, patience: float = 60.0) -> None:
        self._group, self._patience = group, patience

    def verify(self, checkpoint: Path, manifest: Manifest) -> None:
        """Compare every file with its entry; on rank 0, while the others are in `end`.

        Raises:
            ManifestError: a file is missing, has another size or another checksum, or a rank cannot read it; names it.
        """
        check_sizes(checkpoint, manifest.files)
        entries = [asdict(entry) for entry in manifest.files]
        self._group.broadcast({"checkpoint": str(checkpoint), "files": entries})
        self._check(checkpoint, manifest.files)

    def end(self) -> None:
        """Wait until rank 0 has chosen, and check for it until then."""
        if self._group.leads:
            self._group.broadcast({"checkpoint": None})
            return
        while (order := self._group.broadcast(None))["checkpoint"] is not None:
            try:
                self._check(Path(order["checkpoint"]), [FileEntry(**entry) for entry in order["files"]])
            except ManifestError:
                continue  # rank 0 has it too, and goes on with another one

    def _check(self, checkpoint: Path, files: Iterable[FileEntry]) -> None:
        """Check this rank's share; raises on all ranks together."""
        group, problem = self._group, ""
        try:
            self._read(checkpoint, share_files(files, group.rank, group.world_size))
        except ManifestError as error:
            problem = str(error)
        except OSError as error:
            problem = f"{checkpoint.name}: rank {group.rank} cannot read {error.filename}: [Errno {error.errno}] {error.strerror}"
        worst = int(group.maxima({"rank": float(group.rank) if problem else -1.0})["rank"])
        if worst >= 0:
            raise ManifestError(group.broadcast(problem, root=worst))

    def _read(self, checkpoint: Path, files: Sequence[FileEntry]) -> None:
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
                    os.listdir(folder)  # noqa: PTH208  # asks the server anew
