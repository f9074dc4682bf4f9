"""Small files of a run by their path in its folder: read locally, or through the orchestrator's pod in a cluster."""

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
    """Error for a file that does not exist in a run's folder."""


class Volume:
    """Folder of a run.

    Args:
        run: location of the run.
        seen: snapshot of the run; in a cluster with its pods.
        api: access to the cluster.
    """

    def __init__(self, run: Run, seen: Snapshot, api: Api) -> None:
        self._run, self._seen, self._api = run, seen, api

    def text(self, path: PurePosixPath) -> str:
        """Return the content of a file.

        Raises:
            NoFileError: the file does not exist.
            NotFoundError: no pod can read it now.
        """
        if isinstance(self._run, FolderRun):
            file = self._run.root / path
            if not file.is_file():
                raise NoFileError(f"there is no file {file}")
            return file.read_text(errors="replace")
        try:
            return self._exec("cat", str(self._inside(path)))
        except ClusterError as error:
            if "No such file" in str(error):
                raise NoFileError(f"the run's volume has no {path}") from None
            raise

    def names(self, path: PurePosixPath) -> list[str]:
        """Return the sorted names in a folder; empty if the folder does not exist."""
        if isinstance(self._run, FolderRun):
            folder = self._run.root / path
            return sorted(one.name for one in folder.iterdir()) if folder.is_dir() else []
        try:
            found = self._exec("ls", "-1", str(self._inside(path))).splitlines()
        except ClusterError as error:
            if "No such file" in str(error):
                return []
            raise
        return sorted(
            name for name in found if "/" not in name
        )  # names from a pod become parts of local paths, so they are checked

    def packed(self, path: PurePosixPath) -> AbstractContextManager[IO[bytes]]:
        """Return a tar stream of a file or a folder of a run in a cluster, with `path` as the name of its root.

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
        """Return kubectl's words that run a command in the pod that mounts the volume."""
        pod = next((p for p in self._seen.processes if p.role == "orchestrator" and p.ready), None)
        if pod is None:
            raise NotFoundError(no_reader(self._seen))
        return ["exec", "--namespace", self._seen.where, pod.name, "-c", "orchestrator", "--"]

    def _exec(self, *command: str) -> str:
        return self._api.ask([*self._through(), *command], timeout=_SECONDS)


def no_reader(seen: Snapshot) -> str:
    """Return the message for a run whose volume cannot be read because its orchestrator does not run."""
    pod = next((one for one in seen.processes if one.role == "orchestrator"), None)
    lacks = "has no orchestrator pod now" if pod is None else f"has an orchestrator that is not ready ({pod.state})"
    told = not_there(seen, lacks)
    if not seen.attempt:
        return told
    claim = f"the claim {seen.storage}" if seen.storage else "its claim"
    return f"its volume is read through the orchestrator's pod: {told}; alternatively mount {claim} in another pod"


def traced_steps(names: list[str]) -> list[int]:
    """Return the steps with a trace in ascending order."""
    return sorted(int(found[1]) for name in names if (found := re.fullmatch(r"step_(\d{8})\.jsonl", name)))
