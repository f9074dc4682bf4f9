"""Runs of a cluster, read with the page's account and shown to each user according to the user's rights."""

from __future__ import annotations

import re
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from threading import Lock

from rlrun.inspect import cluster_reader
from rlrun.inspect.kubectl import ClusterError
from rlrun.inspect.snapshot import Snapshot
from rlrun.inspect.source import events_of, lease_of, pods_of, with_parts
from rlrun.protocol.files.run_folder import ForkedFrom
from rlrun.runtime.json_types import Json
from rlrun.ui.confine import Fence, OutsideError
from rlrun.ui.run_registry import OPEN_RUNS, OpenRun, UnknownRunError, files_fingerprint, short_digest
from rlrun.ui.shown import ForbiddenError, UnreadableError
from rlrun.ui.team.callers import FILES, Caller, Rights, SignedOutError, TooManyError
from rlrun.ui.team.cluster_api import Api, RefusedError, request_error

RUNS = "/apis/rlrun.io/v1alpha1"
_LIST_SECONDS = 2.0
"""Time in seconds for which one list of runs is used for all users."""
_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
Key = tuple[str, str]
"""Namespace and name of a run."""


class ApiParts:
    """Parts of a run that are read from the API server."""

    def __init__(self, api: Api) -> None:
        self._api = api

    def list_pods(self, namespace: str, run: str) -> Json:
        """See `inspect.source.Parts`."""
        return self._get_object(f"/api/v1/namespaces/{namespace}/pods", {"labelSelector": pods_of(run)})

    def read_lease(self, namespace: str, run: str) -> Json:
        """See `inspect.source.Parts`."""
        return self._get_object(f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases/{lease_of(run)}")

    def list_events(self, namespace: str, run: str) -> Json:
        """See `inspect.source.Parts`."""
        return self._get_object(f"/api/v1/namespaces/{namespace}/events", {"fieldSelector": events_of(run)})

    def _get_object(self, path: str, query: Mapping[str, str] | None = None) -> Json:
        try:
            return self._api.get(path, query)
        except ClusterError as error:
            if isinstance(error, RefusedError) and error.status == 404:
                raise
            raise ClusterError(request_error(error)) from None  # the original message names the page's own namespace


class Volumes:
    """Claims that are mounted read-only in this pod.

    Args:
        claims: (namespace, claim) -> folder where its root is mounted.
    """

    def __init__(self, claims: Mapping[tuple[str, str], Path]) -> None:
        self._claims = {key: root.resolve() for key, root in claims.items()}
        self._open: OrderedDict[Path, OpenRun] = OrderedDict()
        self._lock = Lock()

    def run_folder(self, run: Json) -> Path:
        """Return the folder of a run.

        Raises:
            UnreadableError: its claim is not mounted here, or it has no folder.
            OutsideError: the folder is a link to another folder.
        """
        key, storage = _run_key(run), _read_map(run, "spec", "storage")
        place, mount = _read_map(run, "status", "storage").get("path"), str(storage.get("mountPath") or "/data")
        claim = claim_of(run)
        if claim is None or not isinstance(place, str):
            raise UnreadableError("the run has no volume yet: curves and rollouts appear with its first step")
        if (key[0], claim) not in self._claims:
            raise UnreadableError(_is_elsewhere(key, claim))
        top = self._claims[key[0], claim]
        sub = PurePosixPath(str(storage.get("subPath") or "."))
        if sub.is_absolute() or ".." in sub.parts:  # only the admission policy has checked this value
            raise UnreadableError(f"spec.storage.subPath ({sub}) is not a folder of the claim {claim}")
        root = top / sub / _folder_below_mount(place, mount)
        if not root.is_dir():
            raise UnreadableError(f"the folder {root.relative_to(top)} does not exist on the claim {claim}")
        if root.resolve() != root:
            raise OutsideError(f"{root.relative_to(top)} is a link to another folder")
        return root

    def get(self, run: Json) -> OpenRun:
        """Return the files of a run; links to outside of the run's own folder are refused. See `run_folder`."""
        root = self.run_folder(run)
        fence = Fence([root])
        fence.check_run(root)
        with self._lock:
            found = self._open.pop(root, None) or OpenRun(root, fence)
            self._open[root] = found
            while len(self._open) > OPEN_RUNS:
                self._open.popitem(last=False)
            return found

    def files_mark(self, run: Json) -> str:
        """Return a text that changes with the files of a run that are readable here."""
        try:
            return repr(files_fingerprint(self.run_folder(run)))
        except (UnreadableError, OutsideError):
            return ""


def claim_of(run: Json) -> str | None:
    """Return the claim of a run, or None if it is not known yet."""
    found = _read_map(run, "status", "storage").get("claimName") or _read_map(run, "spec", "storage").get("claimName")
    return found if isinstance(found, str) else None


def _folder_below_mount(place: str, mount: str) -> PurePosixPath:
    """Return the folder of a run relative to its mount.

    Raises:
        UnreadableError: the folder is not below the mount.
    """
    path = PurePosixPath(place)
    if ".." in path.parts or not path.is_relative_to(mount):
        raise UnreadableError(f"status.storage.path ({place}) is not below storage.mountPath ({mount})")
    return path.relative_to(mount)


def _is_elsewhere(key: Key, claim: str) -> str:
    namespace, name = key
    return (
        f"curves and rollouts are on the claim {claim} of namespace {namespace}, which this page does not mount: an administrator can set "
        f"ui.namespace to {namespace} and add the claim to ui.claims. Alternatives: rlrun rollouts {name} -n {namespace}, or rlrun pull "
        f"{name} metrics -n {namespace}"
    )


class ClusterRuns:
    """Runs of the namespaces that this page serves, independent of the caller.

    Args:
        api: client with the page's account.
        namespaces: served namespaces; empty: all.
        volumes: claims that are mounted here.
        clock: monotonic clock in seconds.
    """

    def __init__(
        self, api: Api, namespaces: Sequence[str], volumes: Volumes, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.api, self.volumes = api, volumes
        self._namespaces, self._clock = tuple(namespaces), clock
        self._listed: tuple[float, dict[Key, Json]] | None = None
        self._lock = Lock()

    def serves_namespace(self, namespace: str) -> bool:
        """Return whether runs of a namespace are shown here."""
        return not self._namespaces or namespace in self._namespaces

    def list_runs(self) -> dict[Key, Json]:
        """Return all runs by namespace and name, at most two seconds old.

        Raises:
            ClusterError: the runs cannot be listed; an older list is not returned.
        """
        with self._lock:
            if self._listed is None or self._listed[0] + _LIST_SECONDS <= self._clock():
                self._listed = None
                found = [run for path in self._list_paths() for run in self.api.get(path).get("items") or ()]
                self._listed = (self._clock(), {_run_key(run): run for run in sorted(found, key=_run_key)})
            return self._listed[1]

    def _list_paths(self) -> list[str]:
        if not self._namespaces:
            return [f"{RUNS}/rlruns"]
        return [f"{RUNS}/namespaces/{namespace}/rlruns" for namespace in self._namespaces]

    def read_run(self, key: Key) -> Json | None:
        """Return the current state of one run, or None if it does not exist.

        Raises:
            ClusterError: the run cannot be read.
        """
        try:
            return self.api.get(f"{RUNS}/namespaces/{key[0]}/rlruns/{key[1]}")
        except RefusedError as error:
            if error.status == 404:
                return None
            raise

    def fingerprint_runs(self) -> dict[str, str]:
        """Return a short text per run that changes with the run, or with its files here."""
        return {
            id_of(key): short_digest(
                f"{_read_map(run, 'metadata').get('resourceVersion')} {self.volumes.files_mark(run)}"
            )
            for key, run in self.list_runs().items()
        }


class TeamRun:
    """Run that a user may get."""

    def __init__(self, runs: ClusterRuns, run: Json, rights: Rights, caller: Caller) -> None:
        self._runs, self._run, self._rights, self._caller = runs, run, rights, caller
        self._key = _run_key(run)
        self.id, self.label = id_of(self._key), "/".join(self._key)
        namespace, name = self._key
        self.fetch = (f"rlrun pull {name} run -n {namespace} --to {name}", name)

    def read_brief_snapshot(self) -> Snapshot:
        """See `shown.Run`."""
        return cluster_reader.run_snapshot(self._run, now=time.time())

    def read_snapshot(self) -> Snapshot:
        """See `shown.Run`."""
        return with_parts(self._run, ApiParts(self._runs.api), time.time())

    def read_manifest(self) -> dict[str, object]:
        """Return the applied RLRun without its status and server-side metadata."""
        meta = {
            name: _read_map(self._run, "metadata").get(name) for name in ("name", "namespace", "labels", "annotations")
        }
        notes = _read_map(meta, "annotations")
        kept = {
            name: value for name, value in notes.items() if not name.startswith("kubectl.kubernetes.io/last-applied")
        }
        meta["annotations"] = kept or None
        top = {name: self._run.get(name) for name in ("apiVersion", "kind")}
        return {**top, "metadata": {k: v for k, v in meta.items() if v}, "spec": self._run.get("spec") or {}}

    def read_uid(self) -> str:
        """See `shown.Run`."""
        return str(_read_map(self._run, "metadata").get("uid") or "")

    def read_fork(self) -> ForkedFrom | None:
        """See `shown.Run`. Few runs are forks, so the record is read before the caller's right is reviewed."""
        try:
            found = self._runs.volumes.get(self._run).read_fork()
        except (UnreadableError, OutsideError):
            return None
        return found if found is not None and self._rights.may_get_run(self._caller, *self._key, FILES) else None

    def open_files(self) -> OpenRun:
        """See `shown.Run`."""
        if not self._rights.may_get_run(self._caller, *self._key, FILES):
            raise ForbiddenError(
                f"{self._caller.name} may see this run, but not its curves and rollouts, which need the right to get rlruns/{FILES} in "
                f"namespace {self._key[0]}, which Kubernetes' roles edit and admin contain"
            )
        return self._runs.volumes.get(self._run)


class TeamRuns:
    """Runs that one user may get.

    Args:
        runs: runs of the cluster.
        rights: rights of users.
        caller: user of the request.
        current_caller: function that identifies the user again; raises if the user is no longer valid.
    """

    nothing = (
        "There are no runs that you may see. Check your rights: kubectl auth can-i get rlruns --namespace NAMESPACE"
    )

    def __init__(self, runs: ClusterRuns, rights: Rights, caller: Caller, current_caller: Callable[[], Caller]) -> None:
        self._runs, self._rights, self._caller, self._current_caller = runs, rights, caller, current_caller
        self.user = caller.name

    def list_runs(self) -> Iterable[TeamRun]:
        """See `shown.Runs`."""
        found = self._runs.list_runs()
        allowed = self._rights.allowed_runs(self._caller, found)
        return [TeamRun(self._runs, run, self._rights, self._caller) for key, run in found.items() if key in allowed]

    def get(self, run: str) -> TeamRun:
        """See `shown.Runs`. The error does not reveal whether a run exists that the user may not get."""
        namespace, _, name = run.partition(".")
        if not (_NAME.fullmatch(namespace) and _NAME.fullmatch(name) and self._runs.serves_namespace(namespace)):
            raise UnknownRunError(run)
        if not self._rights.may_get_run(self._caller, namespace, name):
            raise UnknownRunError(run)
        found = self._runs.read_run((namespace, name))
        if found is None:
            raise UnknownRunError(run)
        return TeamRun(self._runs, found, self._rights, self._caller)

    def visible_fingerprints(self, fingerprints: Mapping[str, str]) -> Mapping[str, str] | None:
        """See `shown.Runs`."""
        keys = {id: (id.partition(".")[0], id.partition(".")[2]) for id in fingerprints}
        try:
            if self._current_caller() != self._caller:
                return None
            allowed = self._rights.allowed_runs(self._caller, keys.values())
        except (SignedOutError, TooManyError, ClusterError):
            return None  # the page reconnects and then receives the reason
        return {id: text for id, text in fingerprints.items() if keys[id] in allowed}


def id_of(key: Key) -> str:
    """Return the id of a run in URLs; a namespace contains no dot."""
    return ".".join(key)


def _run_key(run: Json) -> Key:
    meta = _read_map(run, "metadata")
    return str(meta.get("namespace")), str(meta.get("name"))


def _read_map(of: Mapping[str, object], *keys: str) -> Mapping[str, object]:
    found: object = of
    for key in keys:
        found = found.get(key) if isinstance(found, Mapping) else None
    return found if isinstance(found, Mapping) else {}
