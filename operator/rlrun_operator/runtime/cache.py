"""Cache of the cluster's objects: plain dicts, filled by watches, by list calls and by the answers to the operator's own writes.

The newest resourceVersion of an object wins, from any source, so that the operator never decides on a state older than its own writes.
Only a consistent list may replace an object by an older state, after etcd was restored (`Store.forget_rewound`). The cache keeps only what
decisions need.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Mapping

from rlrun_operator.kube.resources import CLAIM, LEASE, POD, RLRUN
from rlrun_operator.names import ROLE_LABEL, RUN_LABEL, SPOT_LABEL, attempt_of, run_uid_of
from rlrun_operator.pods import remember_deletion
from rlrun_operator.runtime.cache_fields import Pulse, record_beat, slim_object
from rlrun_operator.sharing import host_name, shared_run_status
from rlrun_operator.state import Manifest, TeamDefaults

Key = tuple[str, str]
"""Namespace and name of a run."""
Ident = tuple[str, str, str]
"""Kind, namespace and name of an object."""
TOMBSTONES = 4096
"""Number of deleted objects whose late events are recognized."""
SPOT_KEPT = 8
"""Number of deleted spot engines that are kept per run."""


class Store:
    """Cache of all runs and their children."""

    def __init__(self) -> None:
        self._objects: dict[Ident, Manifest] = {}
        self._runs: dict[Key, Manifest] = {}
        self._of_run: dict[Key, set[Ident]] = {}
        self._users: dict[Ident, set[Key]] = {}
        self._guests: dict[Key, set[Key]] = {}
        self._pulses: dict[Ident, Pulse] = {}
        self.watching_since: float | None = None
        """Time at which this operator started to lead, or resumed after an outage, in seconds since the epoch."""
        self._gone: dict[Key, list[Manifest]] = {}
        self._gone_spot: dict[Key, list[Manifest]] = {}
        self._dead: dict[str, None] = {}
        self.defaults: Mapping[str, TeamDefaults] = {}
        """Defaults for runs by namespace; the empty name stands for all other namespaces."""

    def put(self, manifest: Manifest, now: float, *, applied: bool = False) -> set[Key]:
        """Add or update one object.

        Args:
            manifest: object from the API server, with its kind.
            now: time at which the operator received it, in seconds since the epoch.
            applied: whether the object is the answer to an apply; then the operator owns all fields that it can own.

        Returns:
            runs for which something changed; empty for an old or unchanged version.
        """
        metadata = manifest["metadata"]
        ident = (sys.intern(manifest["kind"]), sys.intern(metadata.get("namespace", "")), metadata["name"])
        # A late event must not bring a deleted object back.
        if metadata["uid"] in self._dead:
            return set()
        known = self._objects.get(ident)
        # Watches, lists and answers to writes race: the newest version wins. An apply without a change keeps the version, and still
        # proves which fields the operator owns.
        if known is not None and not _is_newer(manifest, known):
            if applied and _version_number(manifest) == _version_number(known):
                self._objects[ident] = {**known, "accepted": known.get("held")}
            return set()
        slim = self._select_fields(manifest, known, applied=applied)
        replaced = known is not None and known["metadata"]["uid"] != metadata["uid"]
        # The time of a renewal is the time of its observation, by the clock of this process: clocks of other
        # machines are not compared.
        if ident[0] == LEASE.kind:
            self._pulses[ident] = record_beat(self._pulses.get(ident), known, slim, now)
        self._objects[ident] = slim
        # A run's document determines its claim and its host, which other keys depend on.
        shares: set[Key] = set()
        if ident[0] == RLRUN.kind:
            key = ident[1], ident[2]
            self._runs[key] = slim
            if replaced:
                self._forget_gone(key)
            self._remember_claim(key, known, slim)
            shares = self._remember_host(key, known, slim)
        keys = self._affected_runs(ident, slim) | shares
        if known is not None:
            if _is_same(slim, known):
                return set()
            keys |= self._affected_runs(ident, known)
            self._detach_from_run(ident, known)
            if ident[0] == POD.kind and replaced:
                self._remember_gone(known)  # its deletion may be reported after its successor
        owner = _run_label(slim)
        if owner is not None:
            self._of_run.setdefault(owner, set()).add(ident)
        return keys

    @staticmethod
    def _select_fields(manifest: Manifest, known: Manifest | None, *, applied: bool) -> Manifest:
        """Return the cached part of an object, with the facts that only the operator knows."""
        slim: Manifest = {sys.intern(name): _intern_strings(value) for name, value in slim_object(manifest).items()}
        if "held" in slim:
            same = known is not None and known["metadata"]["uid"] == manifest["metadata"]["uid"]
            before = known.get("accepted") if known is not None and same else None
            slim = {**slim, "accepted": slim["held"] if applied else before}
        return remember_deletion(slim, known) if manifest["kind"] == POD.kind else slim

    def remove(self, kind: str, namespace: str, name: str, uid: str | None = None) -> set[Key]:
        """Remove a deleted object; a successor of the same name stays.

        Returns:
            runs for which something changed.
        """
        ident = (kind, namespace, name)
        # The UID is remembered, because an event from before the deletion may arrive after it.
        if uid is not None:
            self._dead[uid] = None
            while len(self._dead) > TOMBSTONES:
                del self._dead[next(iter(self._dead))]
        known = self._objects.get(ident)
        # The UID decides: a late deletion must not remove a successor of the same name.
        if known is None or (uid is not None and known["metadata"]["uid"] != uid):
            return set()
        del self._objects[ident]
        if kind == RLRUN.kind:
            self._runs.pop((namespace, name), None)
        self._pulses.pop(ident, None)
        keys = self._affected_runs(ident, known)
        if kind == RLRUN.kind:
            self._remember_claim((namespace, name), known, None)
            self._forget_gone((namespace, name))
            keys |= self._remember_host((namespace, name), known, None)
        self._detach_from_run(ident, known)
        if kind == POD.kind:
            self._remember_gone(known)
        return keys

    def remove_unlisted(
        self, kind: str, namespace: str | None, before: Iterable[Ident], listed: Iterable[Ident]
    ) -> set[Key]:
        """Remove objects that a complete list no longer contains: they were deleted while no watch was open.

        Args:
            kind: kind of the list.
            namespace: namespace of the list; None: all.
            before: `idents(kind, namespace)` from before the list request; the list says nothing about younger objects.
            listed: objects in the list.
        """
        keys: set[Key] = set()
        for ident in set(before) - set(listed):
            known = self._objects.get(ident)
            if known is not None:
                keys |= self.remove(*ident, uid=known["metadata"]["uid"])
        return keys

    def idents_of(self, kind: str, namespace: str | None) -> set[Ident]:
        """Return all objects of a kind."""
        return {i for i in self._objects if i[0] == kind and namespace in (None, i[1])}

    def knows(self, found: Manifest) -> bool:
        """Return whether the cache has this state of an object or a later one, so that `put` would ignore it. Thread-safe."""
        metadata = found["metadata"]
        if metadata["uid"] in self._dead:
            return True
        known = self._objects.get((found["kind"], metadata.get("namespace", ""), metadata["name"]))
        return known is not None and not _is_newer(found, known)

    def memory(self, kind: str, namespace: str | None) -> tuple[dict[Ident, int], set[str]]:
        """Return the versions of all objects of a kind, and the UIDs of deleted objects: the input of `forget_rewound`."""
        return {ident: _version_number(self._objects[ident]) for ident in self.idents_of(kind, namespace)}, set(
            self._dead
        )

    def forget_rewound(self, found: Manifest, before: tuple[Mapping[Ident, int], Collection[str]]) -> bool:
        """Let `put` accept a state that is older than the cached one, because etcd was restored from a backup.

        Args:
            found: object of a consistent list.
            before: result of `memory` from before the list request; later writes of the operator may be newer than the list.

        Returns:
            Whether `found` is older than the cached state, or was cached as deleted.
        """
        versions, gone = before
        metadata = found["metadata"]
        if metadata["uid"] in gone and metadata["uid"] in self._dead:
            del self._dead[metadata["uid"]]
            self._unremember_gone(metadata["uid"])
            return True
        # Only an object that has not changed since before the list can be compared: a later write of the
        # operator is newer than the list.
        ident = (found["kind"], metadata.get("namespace", ""), metadata["name"])
        known = self._objects.get(ident)
        if known is None or not _version_number(found) < _version_number(known) == versions.get(ident):
            return False
        self._objects[ident] = {**known, "metadata": {**known["metadata"], "resourceVersion": "0"}}
        return True

    def get(self, kind: str, namespace: str, name: str) -> Manifest | None:
        """Return one object, or None."""
        return self._objects.get((kind, namespace, name))

    def runs(self) -> list[Manifest]:
        """Return all runs."""
        return list(self._runs.values())

    def run_count(self) -> int:
        """Return the number of runs."""
        return len(self._runs)

    def children(self, key: Key) -> list[Manifest]:
        """Return all watched objects with the run's label, including pods, sorted by kind and name."""
        return [self._objects[ident] for ident in sorted(self._of_run.get(key, ()))]

    def gone(self, key: Key) -> list[Manifest]:
        """Return the last state of deleted trainer and orchestrator pods of the run's newest attempt, and of its last spot engines.

        A controller recreates a pod under the same name at once, so that later only the UID shows the deletion.
        """
        return [*self._gone.get(key, ()), *self._gone_spot.get(key, ())]

    def guests(self, host: Key) -> list[Manifest]:
        """Return the runs whose `trainer.sharedWith` names this run, sorted by name; the host itself may not exist."""
        return [self._objects[(RLRUN.kind, *key)] for key in sorted(self._guests.get(host, ()))]

    def lease_changed_at(self, namespace: str, name: str) -> float | None:
        """Return the time of the last observed renewal of this Lease, in seconds since the epoch."""
        pulse = self._pulses.get((LEASE.kind, namespace, name))
        return pulse.renewed_at if pulse is not None else None

    def lease_moved_at(self, namespace: str, name: str) -> float | None:
        """Return the time of the last observed progress in this Lease, in seconds since the epoch."""
        pulse = self._pulses.get((LEASE.kind, namespace, name))
        return pulse.moved_at if pulse is not None else None

    def rebase_leases(self, now: float) -> None:
        """Treat all Leases as renewed now: the operator could not observe renewals for a while, which is not a stall."""
        self.watching_since = now
        for ident in self._pulses:
            self._pulses[ident] = Pulse(now, now)

    def count(self) -> dict[str, int]:
        """Return the number of objects by kind."""
        counts: dict[str, int] = {}
        for kind, _, _ in self._objects:
            counts[kind] = counts.get(kind, 0) + 1
        return counts

    def _affected_runs(self, ident: Ident, manifest: Manifest) -> set[Key]:
        kind, namespace, name = ident
        if kind == RLRUN.kind:
            return {(namespace, name)}
        keys = set(self._users.get(ident, ()))
        owner = _run_label(manifest)
        return keys if owner is None else keys | {owner}

    def _detach_from_run(self, ident: Ident, manifest: Manifest) -> None:
        owner = _run_label(manifest)
        if owner is not None and owner in self._of_run:
            self._of_run[owner].discard(ident)
            if not self._of_run[owner]:
                del self._of_run[owner]

    def _forget_gone(self, key: Key) -> None:
        self._gone.pop(key, None)
        self._gone_spot.pop(key, None)

    def _remember_gone(self, pod: Manifest) -> None:
        labels = pod["metadata"].get("labels") or {}
        owner, role = _run_label(pod), labels.get(ROLE_LABEL)
        if owner is None or (role == "inference" and SPOT_LABEL not in labels) or not self._is_present(owner, pod):
            return
        if role == "inference":
            self._gone_spot[owner] = [*self._gone_spot.get(owner, ()), pod][-SPOT_KEPT:]
            return
        number, known = attempt_of(pod["metadata"]) or 0, self._gone.get(owner, [])
        newest = max([number, *(attempt_of(other["metadata"]) or 0 for other in known)])
        self._gone[owner] = [p for p in (*known, pod) if (attempt_of(p["metadata"]) or 0) == newest]

    def _unremember_gone(self, uid: str) -> None:
        for known in (self._gone, self._gone_spot):
            for key, pods in list(known.items()):
                known[key] = [pod for pod in pods if pod["metadata"]["uid"] != uid]

    def _is_present(self, key: Key, pod: Manifest) -> bool:
        """Return whether a pod belongs to the current run of that name: by its UID annotation, or by owner references."""
        run = self._objects.get((RLRUN.kind, *key))
        if run is None:
            return False
        run_uid = run_uid_of(pod["metadata"])
        if run_uid is not None:
            return bool(run_uid == run["metadata"]["uid"])
        owners = {run["metadata"]["uid"]}
        owners |= {child["metadata"]["uid"] for child in self.children(key) if owners & _owner_uids(child)}
        return bool(owners & _owner_uids(pod))

    def _remember_host(self, key: Key, old: Manifest | None, new: Manifest | None) -> set[Key]:
        """Record the host of a guest.

        Returns:
            runs with the same trainer for which something changed that they read.
        """
        changed = old is None or new is None or shared_run_status(old) != shared_run_status(new)
        hosts = {(key[0], name) for run in (old, new) if (name := host_name(run)) is not None}
        if old is not None and (name := host_name(old)) is not None:
            guests = self._guests.get((key[0], name), set())
            guests.discard(key)
            if not guests:
                self._guests.pop((key[0], name), None)
        if new is not None and (name := host_name(new)) is not None:
            self._guests.setdefault((key[0], name), set()).add(key)
        if not changed:
            return set()
        return set().union(hosts, self._guests.get(key, ()), *(self._guests.get(host, ()) for host in hosts)) - {key}

    def _remember_claim(self, key: Key, old: Manifest | None, new: Manifest | None) -> None:
        before, after = claim_name(old), claim_name(new)
        if before and before != after:
            users = self._users.get((CLAIM.kind, key[0], before), set())
            users.discard(key)
            if not users:
                self._users.pop((CLAIM.kind, key[0], before), None)
        if after:
            self._users.setdefault((CLAIM.kind, key[0], after), set()).add(key)


def _owner_uids(manifest: Manifest) -> set[str]:
    return {owner["uid"] for owner in manifest["metadata"].get("ownerReferences") or ()}


def _run_label(manifest: Manifest) -> Key | None:
    """Return the run that owns an object, by its label."""
    if manifest["kind"] == RLRUN.kind:
        return None
    run = (manifest["metadata"].get("labels") or {}).get(RUN_LABEL)
    return (manifest["metadata"].get("namespace", ""), run) if run else None


def claim_name(run: Manifest | None) -> str | None:
    """Return the name of an existing claim that a run uses; the spec may be malformed."""
    storage = (run or {}).get("spec", {}).get("storage")
    name = storage.get("claimName") if isinstance(storage, Mapping) else None
    return name if isinstance(name, str) else None


def _is_newer(new: Manifest, old: Manifest) -> bool:
    """Return whether `new` is a later state than `old` of the same name."""
    return _version_number(new) > _version_number(old)


def _version_number(manifest: Manifest) -> int:
    """Return the resourceVersion as a number, which is comparable for all objects of one API server."""
    value = str(manifest["metadata"].get("resourceVersion", ""))
    return int(value) if value.isdecimal() else sys.maxsize


def _is_same(a: Manifest, b: Manifest) -> bool:
    """Return whether two slimmed objects differ only in their version."""
    return {**a, "metadata": {**a["metadata"], "resourceVersion": ""}} == {
        **b,
        "metadata": {**b["metadata"], "resourceVersion": ""},
    }


def _intern_strings(value: object) -> object:
    """Return the same JSON with shared strings: the objects of a thousand runs repeat a few hundred strings."""
    if isinstance(value, dict):
        return {sys.intern(k): _intern_strings(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_intern_strings(v) for v in value]
    return sys.intern(value) if type(value) is str and len(value) < 64 else value
