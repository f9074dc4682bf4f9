"""An engine's side of versions that are on the volume as what differs: the whole version, put together in the machine's shared memory.

From the version that lies there, with all differences since; else from the newest whole version on the volume, with all since. Either way
every bucket has the trainer's checksum before anything of the engine is touched. See `rlrun.protocol.messages.delta_files` for the files.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from loguru import logger

from rlrun.inference.weights.preflight import FolderError, Shapes, problem_of_tensors
from rlrun.inference.weights.rebuild import DamagedError, make_bucket, replace_bucket
from rlrun.inference.weights.receive import RefusedError
from rlrun.inference.weights.staging import NoRoomError, Staging, file_name
from rlrun.inference.weights.stored import StoredTensors
from rlrun.protocol.files.paths import COMPLETE
from rlrun.protocol.messages.buckets import Bucket
from rlrun.protocol.messages.delta_files import DeltaFiles, read_manifest
from rlrun.protocol.messages.sparse import Bytes

_THREADS = 4


@dataclass(frozen=True)
class _Link:
    """A folder of what differs."""

    folder: Path
    files: DeltaFiles

    def content(self, bucket: Bucket, place: tuple[str, int]) -> Bytes:
        """Bytes of one bucket."""
        size = self.files.sizes[bucket.index]
        if not size:
            return np.empty(0, np.uint8)
        with (self.folder / place[0]).open("rb") as file:
            file.seek(place[1])
            found: Bytes = np.frombuffer(file.read(size), np.uint8)
        if len(found) != size:
            raise DamagedError(f"{self.folder / place[0]} was not written whole")
        return found


class Rebuilder:
    """Puts versions together.

    Args:
        expected: the served model's tensors; None: unknown.
        staging: where; default: the machine's shared memory.
    """

    def __init__(self, *, expected: Shapes | None, staging: Staging | None = None) -> None:
        self._expected, self._staging = expected, staging or Staging()
        self._lock = threading.Lock()

    def make(self, folder: Path) -> Path:
        """The folder in shared memory with the version of a published folder; stays until the next one is made from it.

        Args:
            folder: of what differs.

        Raises:
            RefusedError: it cannot be made; the engine is untouched.
        """
        with self._lock:  # one that ran too long may still be at it
            try:
                return self._make(folder)
            except (DamagedError, NoRoomError, FolderError, OSError, ValueError) as error:
                self._staging.drop_all()
                raise RefusedError(f"the version in {folder} cannot be put together: {error}") from None

    def close(self) -> None:
        """Leave nothing in shared memory."""
        self._staging.close()

    def _make(self, folder: Path) -> Path:
        held = self._staging.whole
        chain = _delta_chain(folder, None if held is None else held.checksum)
        target = chain[0].files
        problem = problem_of_tensors(target.tensors, self._expected)
        if problem is not None:
            raise FolderError(problem)
        if held is not None and held.checksum == target.checksum:
            return held.folder
        if held is not None and held.checksum == chain[-1].files.base:
            try:
                return self._from_memory(chain)
            except DamagedError as error:
                logger.warning(
                    f"version {target.version} cannot be made from what is in memory: {error}; it is read whole"
                )
                chain = _delta_chain(folder, None)
        return self._from_volume(chain)

    def _from_memory(self, links: Sequence[_Link]) -> Path:
        target = links[0].files
        base, folder = self._staging.follow(target.version, target.buckets())

        def one(bucket: Bucket, path: Path, sent: Sequence[Bytes], expected: int) -> None:
            replace_bucket(base / path.name, path, bucket, sent, expected)

        return self._all(links, folder, one)

    def _from_volume(self, chain: Sequence[_Link]) -> Path:
        """Read the newest whole version, and apply what is newer."""
        root, target = chain[0].folder.parent, chain[0].files
        whole, links = (target.whole, []) if target.whole else (None, list(chain))
        for count, link in enumerate(chain, start=1):
            if whole is None and link.files.whole_base is not None:
                whole, links = link.files.whole_base, list(chain[:count])
        if whole is None or not (root / whole / COMPLETE).is_file():
            raise RefusedError(
                f"version {target.version} is in {chain[0].folder} as what differs, and no whole version before it is left on the volume",
                gone=True,
            )
        stored = StoredTensors(root / whole)

        def one(bucket: Bucket, path: Path, sent: Sequence[Bytes], expected: int) -> None:
            make_bucket(path, bucket, lambda body: stored.fill(bucket, body), sent, expected)

        self._staging.drop_all()
        folder = self._staging.open(target.version, target.buckets())
        return self._all(links, folder, one, target=target)

    def _all(
        self,
        links: Sequence[_Link],
        folder: Path,
        act: Callable[[Bucket, Path, Sequence[Bytes], int], None],
        *,
        target: DeltaFiles | None = None,
    ) -> Path:
        """Make the files of all buckets; `links` are what differs, the newest first."""
        files = target or links[0].files
        buckets, oldest_first = files.buckets(), [(link, link.files.places()) for link in reversed(links)]

        def one(bucket: Bucket) -> None:
            sent = [link.content(bucket, places[bucket.index]) for link, places in oldest_first]
            act(bucket, folder / file_name(bucket, len(buckets)), sent, files.checksums[bucket.index])

        with ThreadPoolExecutor(_THREADS) as pool:
            list(pool.map(one, buckets))
        self._staging.settle(folder, files.checksum)
        return folder


def _delta_chain(folder: Path, held: int | None) -> list[_Link]:
    """What differs, the newest first, as far back as it has to be read: to what makes a version from the held one (its checksum); if
    none is, to a whole version; else to the oldest that is there.

    Raises:
        ValueError: the newest is damaged; older ones end the chain then.
    """
    chain = [_Link(folder, read_manifest(folder))]
    while (newest := chain[-1].files).base != held and newest.before is not None:
        if held is None and newest.whole_base is not None:
            break
        before = folder.parent / newest.before
        try:
            link = _Link(before, read_manifest(before))
        except ValueError:
            break
        if link.files.tensors != newest.tensors or link.files.checksum != newest.base:
            break
        chain.append(link)
    return chain
