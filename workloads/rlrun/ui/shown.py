"""Runs as the routes see them: through this interface alone, whatever they are read from and whoever asks."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Protocol

from rlrun.inspect.folder.small_files import read_config
from rlrun.inspect.snapshot import Snapshot
from rlrun.protocol.files.forked import ForkedFrom
from rlrun.ui.confine import OutsideError
from rlrun.ui.registry import OpenRun, Registry, run_id


class ForbiddenError(Exception):
    """Somebody may see a run, and not what was asked of it; one sentence for a person."""


class UnreadableError(LookupError):
    """The files of a run cannot be read by this server; says why, and how they can be read."""


class Run(Protocol):
    """A run that the one who asks may see."""

    @property
    def id(self) -> str:
        """Its name in addresses."""

    @property
    def label(self) -> str:
        """Its name for people."""

    @property
    def fetch(self) -> tuple[str, str]:
        """Command that brings its folder to where commands read it, empty where it is there; and that folder."""

    def glance(self) -> Snapshot:
        """A look for the list of all runs."""

    def snapshot(self) -> Snapshot:
        """A look with all parts."""

    def manifest(self) -> dict[str, object]:
        """The manifest as it was given, with secrets."""

    def uid(self) -> str:
        """The uid by which its forks name it; empty: it has none yet."""

    def fork(self) -> ForkedFrom | None:
        """The run and step that it was forked from; None: it is no fork, or who asks may not read that."""

    def files(self) -> OpenRun:
        """Its files.

        Raises:
            UnreadableError: this server cannot read them.
            ForbiddenError: who asks may not.
            OutsideError: a link leads out of its folder.
        """


class Runs(Protocol):
    """Runs that the one who asks may see."""

    @property
    def nothing(self) -> str:
        """Sentence for a page without runs."""

    @property
    def user(self) -> str | None:
        """Name of the user; None: nobody has to log in."""

    def all(self) -> Iterable[Run]:
        """All of them, in the order in which they are shown."""

    def get(self, run: str) -> Run:
        """The run of an id.

        Raises:
            UnknownRunError: there is none, or none for who asks.
        """

    def seen(self, fingerprints: Mapping[str, str]) -> Mapping[str, str] | None:
        """Fingerprints of the runs that may be told now; None: nothing may be told any more."""


class FolderRun:
    """A run in a folder of this machine."""

    def __init__(self, registry: Registry, run: OpenRun) -> None:
        self._registry, self._run = registry, run
        self.id, self.label = run_id(run.root), run.root.name
        self.fetch = ("", str(run.root))

    def glance(self) -> Snapshot:
        """See `Run`."""
        return self._registry.snapshot(self._run.root, time.time())

    snapshot = glance

    def manifest(self) -> dict[str, object]:
        """The resolved configuration, as it is stored."""
        return stored_manifest(self._run)

    def uid(self) -> str:
        """See `Run`."""
        with suppress(OutsideError):
            return self._run.uid()
        return ""

    def fork(self) -> ForkedFrom | None:
        """See `Run`."""
        with suppress(OutsideError):
            return self._run.fork()
        return None

    def files(self) -> OpenRun:
        """See `Run`."""
        return self._run


class FolderRuns:
    """All runs of the given folders, for whoever may ask this server at all.

    Args:
        registry: the runs.
        folders: names of the given folders, for people.
    """

    user = None

    def __init__(self, registry: Registry, folders: Sequence[str]) -> None:
        self._registry = registry
        self.nothing = f"No run is in {', '.join(folders)} yet. `rlrun local run.yaml` puts one into ./runs; it appears here by itself."

    def all(self) -> Iterable[Run]:
        """See `Runs`."""
        fence = self._registry.fence
        return [FolderRun(self._registry, OpenRun(root, fence)) for root in self._registry.runs().values()]

    def get(self, run: str) -> Run:
        """See `Runs`."""
        return FolderRun(self._registry, self._registry.get(run))

    def seen(self, fingerprints: Mapping[str, str]) -> Mapping[str, str]:
        """See `Runs`."""
        return fingerprints


def stored_manifest(run: OpenRun) -> dict[str, object]:
    """The resolved configuration in a run's folder."""
    paths = run.paths
    if paths.run_json.is_file():
        with run.fence.open(paths.run_json) as file, suppress(ValueError, RecursionError):
            document = json.load(file)
            if isinstance(document, dict):
                return document
    return read_config(paths, paths.attempts_on_disk())
