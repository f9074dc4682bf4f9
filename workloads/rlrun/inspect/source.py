"""Location of a run, a folder on this machine or a name in a cluster, with readers of its snapshot and its small files.

`Volume` reads small files by their path in the run's folder: locally, or through the orchestrator's pod in a cluster.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import IO, Protocol

from rlrun.config.suggest import did_you_mean
from rlrun.inspect import cluster_reader, folder_reader
from rlrun.inspect.kubectl import RUNS, Api, ClusterError, ask_json
from rlrun.inspect.snapshot import Snapshot
from rlrun.inspect.why import not_there
from rlrun.runtime import exit_codes
from rlrun.runtime.json_types import Json


class NotFoundError(Exception):
    """Error for a missing run, or a missing part of a run; the message is one line for people."""

    code = exit_codes.USAGE


@dataclass(frozen=True)
class FolderRun:
    """Run in a folder of this machine."""

    root: Path


@dataclass(frozen=True)
class ClusterRun:
    """Run in a cluster."""

    name: str


Run = FolderRun | ClusterRun


def find_run(word: str, *, cluster_only: bool = False) -> Run:
    """Return the run that an argument names: a path (with a `/`, or a folder with a run), or a name in the cluster.

    Args:
        word: argument of the command line.
        cluster_only: whether the argument is always a name in the cluster.

    Raises:
        NotFoundError: the argument is a path without a run.
    """
    root = Path(word).expanduser()
    if not cluster_only and root.is_file():
        raise NotFoundError(_of_a_file(root, word))
    is_path = os.sep in word or word in (".", "..", "~")
    if not cluster_only and (is_path or folder_reader.is_run(root)):
        if folder_reader.is_run(root):
            return FolderRun(root)
        below = folder_reader.runs_below(root)
        hint = (
            f"; it contains {len(below)} runs, such as {below[0]}"
            if below
            else "; `rlrun get` lists the runs of the cluster"
        )
        why = f"{root} is not the folder of a run" if root.is_dir() else f"there is no folder {root}"
        near = did_you_mean(str(root), [str(one) for one in folder_reader.runs_below(root.parent)]) if not below else ""
        raise NotFoundError(f"{why}{near}; name a folder that `rlrun local` created{hint}")
    if is_path:
        raise NotFoundError(f"{word} is not a valid name of a run in a cluster")
    return ClusterRun(word)


def _of_a_file(file: Path, word: str) -> str:
    """Return the error for a file instead of a run; for a manifest it contains the name of its run."""
    named = re.search(
        r"^metadata:.*?\bname:\s*[\"']?([a-z][a-z0-9-]*)", _read_beginning(file), re.MULTILINE | re.DOTALL
    )
    if named is None:
        return f"RUN: {word} is a file, expected the folder of a run (runs/NAME), or the name of a run in the cluster"
    return f"RUN: {word} is a file, expected the folder of a run (runs/{named[1]}), or the name of a run in the cluster ({named[1]})"


def _read_beginning(file: Path) -> str:
    try:
        with file.open("rb") as content:
            return content.read(65_536).decode(errors="replace")
    except OSError:
        return ""


def read_run(run: Run, api: Api, now: float, *, events: bool = True) -> Snapshot:
    """Return the snapshot of a run.

    Raises:
        ClusterError: the run itself cannot be read. Other unreadable parts are listed in `unread`.
    """
    if isinstance(run, FolderRun):
        return folder_reader.read_folder(run.root, now)
    try:
        found = ask_json(api, ["get", RUNS, run.name])
    except ClusterError as error:
        raise ClusterError(f"{error}{_near_run_hint(run.name, api, error)}", error.code) from None
    return with_parts(found, KubectlParts(api), now, events=events)


def _near_run_hint(name: str, api: Api, error: ClusterError) -> str:
    """Return a hint at similar names, or at a local run with this name, if the cluster has no such run or is unreachable."""
    if folder_reader.is_run(here := Path("runs") / name):
        return f"; a run with this name is in {here}"
    empty = f"; the folder {name} is not the folder of a run (no run.json)" if Path(name).is_dir() else ""
    if error.code != exit_codes.USAGE:
        return empty
    try:
        listed = ask_json(api, ["get", RUNS]).get("items") or ()
    except ClusterError:
        return empty
    return did_you_mean(name, [str(one["metadata"]["name"]) for one in listed]) + empty


class Parts(Protocol):
    """Objects of a run in a cluster. Each method raises `ClusterError` if the object cannot be read."""

    def list_pods(self, namespace: str, run: str) -> Json:
        """Return the list of the run's pods."""

    def read_lease(self, namespace: str, run: str) -> Json:
        """Return the run's progress Lease."""

    def list_events(self, namespace: str, run: str) -> Json:
        """Return the list of events about the run."""


class KubectlParts:
    """Objects of a run, read with `kubectl`."""

    def __init__(self, api: Api) -> None:
        self._api = api

    def list_pods(self, namespace: str, run: str) -> Json:
        """See `Parts`."""
        return ask_json(self._api, ["get", "pods", "--namespace", namespace, "-l", pods_of(run)])

    def read_lease(self, namespace: str, run: str) -> Json:
        """See `Parts`."""
        return ask_json(self._api, ["get", "leases.coordination.k8s.io", lease_of(run), "--namespace", namespace])

    def list_events(self, namespace: str, run: str) -> Json:
        """See `Parts`."""
        return ask_json(self._api, ["get", "events", "--namespace", namespace, "--field-selector", events_of(run)])


def pods_of(run: str) -> str:
    """Return the label selector of a run's pods."""
    return f"rlrun.io/run={run}"


def lease_of(run: str) -> str:
    """Return the name of a run's progress Lease."""
    return f"{run}-progress"


def events_of(run: str) -> str:
    """Return the field selector of the events about a run."""
    return f"involvedObject.kind=RLRun,involvedObject.name={run}"


def with_parts(run: Json, parts: Parts, now: float, *, events: bool = True) -> Snapshot:
    """Return the snapshot of an RLRun with its pods, Lease and events; unreadable parts are listed in `unread`.

    Args:
        run: RLRun object.
        parts: reader of the other objects.
        now: seconds since the epoch.
        events: whether events are read.
    """
    name, namespace = run["metadata"]["name"], run["metadata"]["namespace"]
    wanted: dict[str, Callable[[], Json]] = {
        "pods": lambda: parts.list_pods(namespace, name),
        "its progress Lease": lambda: parts.read_lease(namespace, name),
    }
    if events:
        wanted["events"] = lambda: parts.list_events(namespace, name)
    got, unread = _answer_all(wanted)
    if run.get("status", {}).get("phase") in (None, "Unserved", "Pending", "Complete", "Failed", "Suspended"):
        unread = [line for line in unread if not (line.startswith("its progress Lease") and "ot found" in line)]
    seen = cluster_reader.run_snapshot(
        run,
        pods=got.get("pods", {}).get("items") or (),
        events=got.get("events", {}).get("items") or (),
        lease=got.get("its progress Lease"),
        now=now,
    )
    return replace(seen, unread=tuple(unread))


def _answer_all(wanted: dict[str, Callable[[], Json]]) -> tuple[dict[str, Json], list[str]]:
    """Run several requests in parallel; returns their results, and messages for those that failed."""
    got: dict[str, Json] = {}
    unread = []
    with ThreadPoolExecutor(len(wanted)) as pool:
        for what, answer in [(what, pool.submit(ask)) for what, ask in wanted.items()]:
            try:
                got[what] = answer.result()
            except ClusterError as error:
                unread.append(f"{what} could not be read: {error}")
    return got, unread


def read_cluster(api: Api, now: float, *, everywhere: bool = False) -> list[Snapshot]:
    """Return snapshots of all runs of a namespace, or of all namespaces, by namespace and name, without pods, events and Leases."""
    listed = ask_json(api, ["get", RUNS, *(["--all-namespaces"] if everywhere else [])])
    found = [cluster_reader.run_snapshot(one, now=now) for one in listed.get("items") or ()]
    return sorted(found, key=lambda one: (one.where, one.name))


def read_folders(roots: Sequence[Path], now: float) -> list[Snapshot]:
    """Return snapshots of all runs in folders, and in their direct subfolders."""
    return [folder_reader.read_folder(root, now) for above in roots for root in folder_reader.runs_below(above)]


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

    def read_text(self, path: PurePosixPath) -> str:
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
            return self._exec_output("cat", str(self._volume_path(path)))
        except ClusterError as error:
            if "No such file" in str(error):
                raise NoFileError(f"the run's volume has no {path}") from None
            raise

    def list_names(self, path: PurePosixPath) -> list[str]:
        """Return the sorted names in a folder; empty if the folder does not exist."""
        if isinstance(self._run, FolderRun):
            folder = self._run.root / path
            return sorted(one.name for one in folder.iterdir()) if folder.is_dir() else []
        try:
            found = self._exec_output("ls", "-1", str(self._volume_path(path))).splitlines()
        except ClusterError as error:
            if "No such file" in str(error):
                return []
            raise
        return sorted(
            name for name in found if "/" not in name
        )  # names from a pod become parts of local paths, so they are checked

    def stream_tar(self, path: PurePosixPath) -> AbstractContextManager[IO[bytes]]:
        """Return a tar stream of a file or a folder of a run in a cluster, with `path` as the name of its root.

        Raises:
            NotFoundError: no pod can read it now.
        """
        folder = str(self._volume_path(PurePosixPath()))
        return self._api.stream_output([*self._exec_words(), "tar", "-C", folder, "-cf", "-", "--", str(path)])

    def _volume_path(self, path: PurePosixPath) -> PurePosixPath:
        if self._seen.folder is None:
            raise NotFoundError(not_there(self._seen, "has no volume yet"))
        return PurePosixPath(self._seen.folder) / path

    def _exec_words(self) -> list[str]:
        """Return kubectl's words that run a command in the pod that mounts the volume."""
        pod = next((p for p in self._seen.processes if p.role == "orchestrator" and p.ready), None)
        if pod is None:
            raise NotFoundError(no_reader(self._seen))
        return ["exec", "--namespace", self._seen.where, pod.name, "-c", "orchestrator", "--"]

    def _exec_output(self, *command: str) -> str:
        return self._api.read_output([*self._exec_words(), *command], timeout=_SECONDS)


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
