"""Runs that the page may show, by id, and cached data of each run between requests."""

from __future__ import annotations

import hashlib
import json
import os
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from threading import Lock

from rlrun.inspect.folder_reader import is_run, read_folder, runs_below
from rlrun.inspect.snapshot import Snapshot
from rlrun.protocol.files.paths import RunPaths
from rlrun.protocol.files.run_folder import ForkedFrom, fork_of
from rlrun.ui.confine import Fence
from rlrun.ui.steps import StepIndex
from rlrun.ui.traces import TraceIndex

OPEN_RUNS = 32
"""Maximum number of runs whose metrics are kept in memory; the least recently used is dropped."""
_OPEN_TRACES = 4
"""Maximum number of trace indexes per run."""
_FORK_BYTES = 1 << 20
_OVER = ("Complete", "Failed", "Suspended")
Fingerprint = tuple[tuple[int, int, int], ...]


class UnknownRunError(LookupError):
    """Error for an unknown run id."""


class OpenRun:
    """Open run with cached indexes.

    Args:
        root: folder of the run.
        fence: folders that may be read.
    """

    def __init__(self, root: Path, fence: Fence) -> None:
        self.root, self.paths, self.fence = root, RunPaths(root), fence
        self._steps = StepIndex(self.paths.metrics)
        self._traces: OrderedDict[tuple[str, int, int, int], TraceIndex] = OrderedDict()
        self._lock = Lock()

    def read_steps(self) -> StepIndex:
        """Return the up-to-date metrics.

        Raises:
            OutsideError: the file is a link to the outside.
        """
        if self.paths.metrics.exists():
            self.fence.open(self.paths.metrics).close()
        self._steps.refresh()
        return self._steps

    def read_fork(self) -> ForkedFrom | None:
        """Return the origin of a fork, or None if the run is not a fork.

        Raises:
            OutsideError: the record is a link to the outside.
        """
        try:
            with self.fence.open(self.paths.fork) as file:
                return fork_of(file.read(_FORK_BYTES))
        except OSError:
            return None

    def read_uid(self) -> str:
        """Return the run's uid from its newest attempt, or an empty text before the first attempt.

        Raises:
            OutsideError: the file of the attempt is a link to the outside.
        """
        for number in reversed(self.paths.attempts_on_disk()):
            path = self.paths.attempt_file(number)
            with suppress(OSError, ValueError, AttributeError, RecursionError), self.fence.open(path) as file:
                return str(json.loads(file.read(_FORK_BYTES)).get("uid") or "")
        return ""

    def read_trace_index(self, path: Path) -> TraceIndex:
        """Return the index of a trace; it is rebuilt only if the file has changed.

        Raises:
            FileNotFoundError: the step has no trace.
            OutsideError: the trace is a link to the outside.
        """
        with self._lock, self.fence.open(path) as file:
            found = os.fstat(file.fileno())
            key = (path.name, found.st_ino, found.st_size, found.st_mtime_ns)
            index = self._traces.pop(key, None) or TraceIndex(file)
            self._traces[key] = index
            while len(self._traces) > _OPEN_TRACES:
                self._traces.popitem(last=False)
            return index


class Registry:
    """Runs of the given folders, listed again for every request.

    Args:
        folders: folders of runs, or folders that directly contain runs.
    """

    def __init__(self, folders: Sequence[Path]) -> None:
        self._folders = tuple(folders)
        self.fence = Fence(folders)
        self._open: OrderedDict[Path, OpenRun] = OrderedDict()
        self._over: dict[Path, tuple[Fingerprint, Snapshot]] = {}
        self._lock = Lock()
        self.snapshots_read = 0
        """Number of folders that were read for a snapshot."""

    def find_run_folders(self) -> dict[str, Path]:
        """Return the folders of all runs by id, in the order of the given folders and of names."""
        found: dict[str, Path] = {}
        for folder in self._folders:
            for root in runs_below(folder):
                found.setdefault(run_id(root), root)
        return found

    def get(self, run: str) -> OpenRun:
        """Return the run with an id.

        Raises:
            UnknownRunError: the run does not exist.
            OutsideError: its folder contains a link to the outside.
        """
        root = next((root for folder in self._folders for root in _run_candidates(folder) if run_id(root) == run), None)
        if root is None or not is_run(root):
            raise UnknownRunError(run)
        self.fence.check_run(root)
        with self._lock:
            found = self._open.pop(root, None) or OpenRun(root, self.fence)
            self._open[root] = found
            while len(self._open) > OPEN_RUNS:
                self._open.popitem(last=False)
            return found

    def read_snapshot(self, root: Path, now: float) -> Snapshot:
        """Return a snapshot of a run. For a finished run the previous snapshot is reused while its files are unchanged.

        Raises:
            OutsideError: its folder contains a link to the outside.
        """
        self.fence.check_run(root)
        before, mark = self._over.get(root), files_fingerprint(root)
        if before is not None and before[0] == mark:
            return before[1]
        self.snapshots_read += 1
        seen = read_folder(root, now)
        if seen.phase in _OVER:
            self._over[root] = (mark, seen)
        else:
            self._over.pop(root, None)
        return seen

    def fingerprint_runs(self) -> dict[str, str]:
        """Return a short text per run that changes with its folder, including runs that may not be read."""
        return {run: short_digest(repr(files_fingerprint(root))) for run, root in self.find_run_folders().items()}


def _run_candidates(folder: Path) -> list[Path]:
    try:
        return [folder, *sorted(folder.iterdir())]
    except OSError:
        return [folder]


def run_id(root: Path) -> str:
    """Return the id of a run in URLs: its folder's readable name, and a digest of its path."""
    plain = "".join(
        letter if letter.isascii() and (letter.isalnum() or letter in "-_") else "-" for letter in root.name
    )
    return f"{plain[:80]}.{short_digest(str(root.absolute()))}"


def short_digest(text: str) -> str:
    """Return an eight-letter digest of a text."""
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:8]


def files_fingerprint(root: Path) -> Fingerprint:
    """Return the state of the files that an active run writes, without reading them."""
    paths = RunPaths(root)
    files = (
        paths.metrics,
        paths.launcher,
        paths.run_json,
        paths.attempts,
        paths.checkpoints,
        paths.traces,
        root / "logs",
    )
    return tuple(_file_state(path) for path in files)


def _file_state(path: Path) -> tuple[int, int, int]:
    try:
        found = path.stat()
    except OSError:
        return (0, 0, 0)
    return (found.st_ino, found.st_size, found.st_mtime_ns)
