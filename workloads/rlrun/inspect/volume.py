"""Small files of a run by their path in its folder: read here, or through the orchestrator's pod of a cluster."""

from __future__ import annotations

import re
from contextlib import AbstractContextManager
from pathlib import PurePosixPath
from typing import IO

from rlrun.inspect.kubectl import Api, ClusterError
from rlrun.inspect.snapshot import Snapshot
from rlrun.inspect.source import FolderRun, NotFoundError, Run
from rlrun.inspect.why import not_there

_SECONDS = 60.0


class NoFileError(NotFoundError):
    """Error for a file that a run's folder does not have."""


class Volume:
    """A run's folder.

    Args:
        run: where it is.
        seen: a look at it; of a run in a cluster, with its pods.
        api: the cluster.
    """

    def __init__(self, run: Run, seen: Snapshot, api: Api) -> None:
        self._run, self._seen, self._api = run, seen, api

    def text(self, path: PurePosixPath) -> str:
        """Content of a file.

        Raises:
            NoFileError: it is not there.
            NotFoundError: no pod can read it now.
        """
        if isinstance(self._run, FolderRun):
            file = self._run.root / path
            if not file.is_file():
                raise NoFileError(f"there is no {file}")
            return file.read_text(errors="replace")
        try:
            return self._exec("cat", str(self._inside(path)))
        except ClusterError as error:
            if "No such file" in str(error):
                raise NoFileError(f"the run's volume has no {path}") from None
            raise

    def names(self, path: PurePosixPath) -> list[str]:
        """Names in a folder, sorted; none: there is no such folder."""
        if isinstance(self._run, FolderRun):
            folder = self._run.root / path
            return sorted(one.name for one in folder.iterdir()) if folder.is_dir() else []
        try:
            found = self._exec("ls", "-1", str(self._inside(path))).splitlines()
        except ClusterError as error:
            if "No such file" in str(error):
                return []
            raise
        return sorted(name for name in found if "/" not in name)  # what a pod answers becomes a part of paths here

    def packed(self, path: PurePosixPath) -> AbstractContextManager[IO[bytes]]:
        """A tar stream of a file or a folder of a run in a cluster, with `path` as the name of its root.

        Raises:
            NotFoundError: no pod can read it now.
        """
        folder = str(self._inside(PurePosixPath()))
        return self._api.stream([*self._through(), "tar", "-C", folder, "-cf", "-", "--", str(path)])

    def _inside(self, path: PurePosixPath) -> PurePosixPath:
        if self._seen.folder is None:
            raise NotFoundError(not_there(self._seen, "has no volume yet"))
        return PurePosixPath(self._seen.folder) / path

    def _through(self) -> list[str]:
        """Words of kubectl that run a command where the volume is mounted."""
        pod = next((p for p in self._seen.processes if p.role == "orchestrator" and p.ready), None)
        if pod is None:
            raise NotFoundError(no_reader(self._seen))
        return ["exec", "--namespace", self._seen.where, pod.name, "-c", "orchestrator", "--"]

    def _exec(self, *command: str) -> str:
        return self._api.ask([*self._through(), *command], timeout=_SECONDS)


def no_reader(seen: Snapshot) -> str:
    """Words on a run in a cluster whose orchestrator does not run, through whose pod its volume is read."""
    pod = next((one for one in seen.processes if one.role == "orchestrator"), None)
    lacks = "has no orchestrator's pod now" if pod is None else f"has an orchestrator that is not ready ({pod.state})"
    told = not_there(seen, lacks)
    if not seen.attempt:
        return told
    claim = f"the claim {seen.storage}" if seen.storage else "its claim"
    return f"its volume is read through its orchestrator's pod: {told}; or mount {claim} in a pod of your own"


def traced_steps(names: list[str]) -> list[int]:
    """Steps that have a trace, ascending."""
    return sorted(int(found[1]) for name in names if (found := re.fullmatch(r"step_(\d{8})\.jsonl", name)))
