"""Place of a run: a folder on this machine, or a name in a cluster. Reads both into snapshots."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from rlrun.config.suggest import did_you_mean
from rlrun.inspect import cluster
from rlrun.inspect.folder import reader
from rlrun.inspect.kubectl import RUNS, Api, ClusterError, ask_json
from rlrun.inspect.snapshot import Snapshot
from rlrun.runtime import exit_codes
from rlrun.runtime.json_types import Json


class NotFoundError(Exception):
    """Error for a run, or a part of one, that is not there; one line for a person."""

    code = exit_codes.USAGE


@dataclass(frozen=True)
class FolderRun:
    """A run in a folder of this machine."""

    root: Path


@dataclass(frozen=True)
class ClusterRun:
    """A run in a cluster."""

    name: str


Run = FolderRun | ClusterRun


def find_run(word: str, *, cluster_only: bool = False) -> Run:
    """The run that a word of the command line names: a path (with a `/`, or a folder that holds a run), or a name in the cluster.

    Args:
        word: of the command line.
        cluster_only: take it for a name in the cluster, whatever folders there are.

    Raises:
        NotFoundError: it is a path, and no run is there.
    """
    root = Path(word).expanduser()
    if not cluster_only and root.is_file():
        raise NotFoundError(_of_a_file(root, word))
    is_path = os.sep in word or word in (".", "..", "~")
    if not cluster_only and (is_path or reader.is_run(root)):
        if reader.is_run(root):
            return FolderRun(root)
        below = reader.runs_below(root)
        hint = (
            f"; {len(below)} runs are below it, such as {below[0]}"
            if below
            else ", or `rlrun get` for those of the cluster"
        )
        why = f"{root} holds no run" if root.is_dir() else f"there is no folder {root}"
        near = did_you_mean(str(root), [str(one) for one in reader.runs_below(root.parent)]) if not below else ""
        raise NotFoundError(f"{why}{near}: name a folder that `rlrun local` has written{hint}")
    if is_path:
        raise NotFoundError(f"{word} is no name of a run in a cluster")
    return ClusterRun(word)


def _of_a_file(file: Path, word: str) -> str:
    """Message about a file where a run is expected; a manifest has the name of its run."""
    named = re.search(
        r"^metadata:.*?\bname:\s*[\"']?([a-z][a-z0-9-]*)", _read_beginning(file), re.MULTILINE | re.DOTALL
    )
    if named is None:
        return f"RUN: {word} is a file, expected a run's folder (runs/NAME), or its name in the cluster"
    return (
        f"RUN: {word} is a file, expected a run: its folder (runs/{named[1]}), or its name in the cluster ({named[1]})"
    )


def _read_beginning(file: Path) -> str:
    try:
        with file.open("rb") as content:
            return content.read(65_536).decode(errors="replace")
    except OSError:
        return ""


def read_run(run: Run, api: Api, now: float, *, events: bool = True) -> Snapshot:
    """Snapshot of a run.

    Raises:
        ClusterError: the cluster does not give the run itself. What else it does not give is in `unread`.
    """
    if isinstance(run, FolderRun):
        return reader.read_folder(run.root, now)
    try:
        found = ask_json(api, ["get", RUNS, run.name])
    except ClusterError as error:
        raise ClusterError(f"{error}{_near_run_hint(run.name, api, error)}", error.code) from None
    return with_parts(found, KubectlParts(api), now, events=events)


def _near_run_hint(name: str, api: Api, error: ClusterError) -> str:
    """Hint at the run that a name may mean, where the cluster has none of that name or is not there."""
    if reader.is_run(here := Path("runs") / name):
        return f"; a run of this name is in {here}"
    empty = f"; the folder {name} holds no run (no run.json)" if Path(name).is_dir() else ""
    if error.code != exit_codes.USAGE:
        return empty
    try:
        listed = ask_json(api, ["get", RUNS]).get("items") or ()
    except ClusterError:
        return empty
    return did_you_mean(name, [str(one["metadata"]["name"]) for one in listed]) + empty


class Parts(Protocol):
    """Objects of a run in a cluster. Each raises `ClusterError` where it cannot be read."""

    def pods(self, namespace: str, run: str) -> Json:
        """List of its pods."""

    def lease(self, namespace: str, run: str) -> Json:
        """Its progress Lease."""

    def events(self, namespace: str, run: str) -> Json:
        """List of the events about it."""


class KubectlParts:
    """Parts by `kubectl`."""

    def __init__(self, api: Api) -> None:
        self._api = api

    def pods(self, namespace: str, run: str) -> Json:
        """See `Parts`."""
        return ask_json(self._api, ["get", "pods", "--namespace", namespace, "-l", pods_of(run)])

    def lease(self, namespace: str, run: str) -> Json:
        """See `Parts`."""
        return ask_json(self._api, ["get", "leases.coordination.k8s.io", lease_of(run), "--namespace", namespace])

    def events(self, namespace: str, run: str) -> Json:
        """See `Parts`."""
        return ask_json(self._api, ["get", "events", "--namespace", namespace, "--field-selector", events_of(run)])


def pods_of(run: str) -> str:
    """Label selector of a run's pods."""
    return f"rlrun.io/run={run}"


def lease_of(run: str) -> str:
    """Name of a run's progress Lease."""
    return f"{run}-progress"


def events_of(run: str) -> str:
    """Field selector of the events about a run."""
    return f"involvedObject.kind=RLRun,involvedObject.name={run}"


def with_parts(run: Json, parts: Parts, now: float, *, events: bool = True) -> Snapshot:
    """Snapshot of an RLRun with its pods, its Lease and its events; what of these cannot be read is in `unread`.

    Args:
        run: the RLRun.
        parts: reads the rest.
        now: seconds since the epoch.
        events: read these, too.
    """
    name, namespace = run["metadata"]["name"], run["metadata"]["namespace"]
    wanted: dict[str, Callable[[], Json]] = {
        "pods": lambda: parts.pods(namespace, name),
        "its progress Lease": lambda: parts.lease(namespace, name),
    }
    if events:
        wanted["events"] = lambda: parts.events(namespace, name)
    got, unread = _answer_all(wanted)
    if run.get("status", {}).get("phase") in (None, "Unserved", "Pending", "Complete", "Failed", "Suspended"):
        unread = [line for line in unread if not (line.startswith("its progress Lease") and "ot found" in line)]
    seen = cluster.run_snapshot(
        run,
        pods=got.get("pods", {}).get("items") or (),
        events=got.get("events", {}).get("items") or (),
        lease=got.get("its progress Lease"),
        now=now,
    )
    return replace(seen, unread=tuple(unread))


def _answer_all(wanted: dict[str, Callable[[], Json]]) -> tuple[dict[str, Json], list[str]]:
    """Answers to several questions, asked at the same time, and what could not be read."""
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
    """Snapshots of all runs of a namespace, or of all namespaces, by namespace and name; without pods, events and Leases."""
    listed = ask_json(api, ["get", RUNS, *(["--all-namespaces"] if everywhere else [])])
    found = [cluster.run_snapshot(one, now=now) for one in listed.get("items") or ()]
    return sorted(found, key=lambda one: (one.where, one.name))


def read_folders(roots: Sequence[Path], now: float) -> list[Snapshot]:
    """Snapshots of all runs in folders, and in the folders right below them."""
    return [reader.read_folder(root, now) for above in roots for root in reader.runs_below(above)]
