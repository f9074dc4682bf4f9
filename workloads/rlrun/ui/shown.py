"""Interface between the routes and runs, independent of where runs are stored and of the caller."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Protocol

from rlrun.inspect.small_files import read_config
from rlrun.inspect.snapshot import Snapshot
from rlrun.protocol.files.run_folder import ForkedFrom
from rlrun.ui.confine import OutsideError
from rlrun.ui.run_registry import OpenRun, Registry, run_id


class ForbiddenError(Exception):
    """Error if a user may see a run, but not the requested part; the message is one sentence for people."""


class UnreadableError(LookupError):
    """Error if this server cannot read the files of a run; the message contains the cause and an alternative."""


class Run(Protocol):
    """Run that the caller may see."""

    @property
    def id(self) -> str:
        """Id of the run in URLs."""

    @property
    def label(self) -> str:
        """Displayed name of the run."""

    @property
    def fetch(self) -> tuple[str, str]:
        """Command that copies the run's folder to this machine (empty if local), and the name of that folder."""

    def read_brief_snapshot(self) -> Snapshot:
        """Return a snapshot for the list of all runs."""

    def read_snapshot(self) -> Snapshot:
        """Return a snapshot with all parts."""

    def read_manifest(self) -> dict[str, object]:
        """Return the original manifest, including secrets."""

    def read_uid(self) -> str:
        """Return the uid that its forks refer to, or an empty text."""

    def read_fork(self) -> ForkedFrom | None:
        """Return the run and step that it was forked from; None if it is not a fork, or the caller may not read that."""

    def open_files(self) -> OpenRun:
        """Return the run's files.

        Raises:
            UnreadableError: this server cannot read them.
            ForbiddenError: the caller may not read them.
            OutsideError: the folder contains a link to the outside.
        """


class Runs(Protocol):
    """Runs that the caller may see."""

    @property
    def nothing(self) -> str:
        """Text for a page without runs."""

    @property
    def user(self) -> str | None:
        """Name of the user; None: a server without login."""

    def list_runs(self) -> Iterable[Run]:
        """Return all runs in display order."""

    def get(self, run: str) -> Run:
        """Return the run with an id.

        Raises:
            UnknownRunError: the run does not exist, or the caller may not see it.
        """

    def visible_fingerprints(self, fingerprints: Mapping[str, str]) -> Mapping[str, str] | None:
        """Return the fingerprints of runs that the caller may see now; None if the caller has no access any more."""


class FolderRun:
    """Run in a folder of this machine."""

    def __init__(self, registry: Registry, run: OpenRun) -> None:
        self._registry, self._run = registry, run
        self.id, self.label = run_id(run.root), run.root.name
        self.fetch = ("", str(run.root))

    def read_brief_snapshot(self) -> Snapshot:
        """See `Run`."""
        return self._registry.read_snapshot(self._run.root, time.time())

    read_snapshot = read_brief_snapshot

    def read_manifest(self) -> dict[str, object]:
        """Return the stored resolved configuration."""
        return stored_manifest(self._run)

    def read_uid(self) -> str:
        """See `Run`."""
        with suppress(OutsideError):
            return self._run.read_uid()
        return ""

    def read_fork(self) -> ForkedFrom | None:
        """See `Run`."""
        with suppress(OutsideError):
            return self._run.read_fork()
        return None

    def open_files(self) -> OpenRun:
        """See `Run`."""
        return self._run


class FolderRuns:
    """Runs of the given folders, visible to every user of this server.

    Args:
        registry: registry of the runs.
        folders: displayed names of the given folders.
    """

    user = None

    def __init__(self, registry: Registry, folders: Sequence[str]) -> None:
        self._registry = registry
        self.nothing = f"There are no runs in {', '.join(folders)} yet. `rlrun local run.yaml` creates one in ./runs."

    def list_runs(self) -> Iterable[Run]:
        """See `Runs`."""
        fence = self._registry.fence
        return [FolderRun(self._registry, OpenRun(root, fence)) for root in self._registry.find_run_folders().values()]

    def get(self, run: str) -> Run:
        """See `Runs`."""
        return FolderRun(self._registry, self._registry.get(run))

    def visible_fingerprints(self, fingerprints: Mapping[str, str]) -> Mapping[str, str]:
        """See `Runs`."""
        return fingerprints


def stored_manifest(run: OpenRun) -> dict[str, object]:
    """Return the resolved configuration in a run's folder."""
    paths = run.paths
    if paths.run_json.is_file():
        with run.fence.open(paths.run_json) as file, suppress(ValueError, RecursionError):
            document = json.load(file)
            if isinstance(document, dict):
                return document
    return read_config(paths, paths.attempts_on_disk())
