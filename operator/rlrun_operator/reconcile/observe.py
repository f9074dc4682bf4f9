"""Observation of a run (`Observed`) from the cache and a few live reads."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Generic, TypeVar

from rlrun.defaults.team_defaults import apply_defaults
from rlrun_operator.kube.client import ApiError, Client, UnavailableError
from rlrun_operator.kube.resources import (
    CLAIM,
    DEPLOYMENT,
    EVENT,
    LEASE,
    NODE,
    PART_KINDS,
    POD,
    PRIORITY_CLASS,
    QUOTA,
    RLRUN,
    STATEFUL_SET,
)
from rlrun_operator.names import KIND, Names, Ref
from rlrun_operator.runtime.cache import Key, Store, claim_name
from rlrun_operator.sharing import host_name
from rlrun_operator.state import Fact, Manifest, Observed, Refusal, TeamDefaults

LOOK_UP_SECONDS = 5.0
"""Minimum interval between two reads of the events of a namespace, or of the nodes, for all waiting runs together."""
LOOK_UP_SHARE = 0.05
"""Largest share of the time that is spent on such a read: thousands of nodes are read less often than ten."""
CLASS_SECONDS = 60.0
"""Time for which a PriorityClass is cached. Its value never changes, but another class may take its name."""
QUOTA_SECONDS = 2.0
"""Time for which quotas are cached: they are small, and each admission changes their usage."""
FORBIDDEN_SECONDS = 300.0
"""Time for which a refused read is not repeated."""

T = TypeVar("T")
_CHILDREN = (STATEFUL_SET.kind, DEPLOYMENT.kind, CLAIM.kind)
log = logging.getLogger(__name__)


def observe_run(
    store: Store,
    key: Key,
    *,
    refusals: tuple[Refusal, ...] = (),
    access: str | None = None,
    repaired_ago: float = float("inf"),
) -> Observed | None:
    """Return the observation of a run from the store, or None if the run does not exist. For the other arguments see `Observed`."""
    run = store.get(RLRUN.kind, *key)
    if run is None:
        return None
    namespace, name = key
    found = store.children(key)
    children = {Ref(child["kind"], child["metadata"]["name"]): child for child in found if child["kind"] in _CHILDREN}
    shares = host_name(run)
    host = store.get(RLRUN.kind, namespace, shares) if shares is not None else None
    parts = {Ref(child["kind"], child["metadata"]["name"]): child for child in found if child["kind"] in PART_KINDS}
    defaults = defaults_of(store, namespace)
    # A guest uses the volume of its host, so it observes the claim of the host.
    if host is not None:
        host = apply_defaults(host, defaults).run
    claim = claim_of(host) if host is not None else claim_name(run)
    # A claim of the user has no label of the run, so it is not among the children.
    brought = store.get(CLAIM.kind, namespace, claim) if claim else None
    if brought is not None:
        children[Ref(CLAIM.kind, brought["metadata"]["name"])] = brought
    lease = Names(name).progress
    return Observed(
        run=run,
        children=children,
        pods=tuple(child for child in found if child["kind"] == POD.kind),
        gone=tuple(store.gone(key)),
        lease=store.get(LEASE.kind, namespace, lease),
        lease_changed_at=store.lease_changed_at(namespace, lease),
        lease_moved_at=store.lease_moved_at(namespace, lease),
        watching_since=store.watching_since,
        refusals=refusals,
        access=access,
        repaired_ago=repaired_ago,
        host=host,
        parts=parts,
        defaults=defaults,
        guests=tuple(store.guests((namespace, shares or name))),
    )


def defaults_of(store: Store, namespace: str) -> TeamDefaults | None:
    """Return the defaults for the runs of a namespace: its own, or those of the cluster, or None."""
    return store.defaults.get(namespace) or store.defaults.get("")


def claim_of(run: Manifest) -> str:
    """Return the name of the claim that a run uses."""
    return claim_name(run) or Names(str(run["metadata"]["name"])).claim


class LookUps:
    """Live reads of warning events, nodes, quotas and priority classes, shared by all waiting runs.

    Args:
        client: client of the API server.
        read_nodes: whether nodes and pods of all namespaces may be read.
        clock: returns steady seconds.
    """

    def __init__(self, client: Client, *, read_nodes: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self._client = client
        self._read_nodes = read_nodes
        self._clock = clock
        self._warnings: dict[str, _Shared[list[Manifest]]] = {}
        self._quotas: dict[str, _Shared[list[Manifest]]] = {}
        self._classes: dict[str, _Shared[int | str]] = {}
        self._nodes: _Shared[tuple[Manifest, ...] | None] = _Shared(self._list_nodes, clock)
        self._pods: _Shared[tuple[Manifest, ...] | None] = _Shared(self._list_pods, clock)

    async def add_requested_facts(
        self, observed: Observed, facts: Iterable[Fact], extra: Iterable[Manifest] = ()
    ) -> Observed:
        """Return `observed` with the facts that a decision requested.

        Args:
            observed: observation of the run.
            facts: requested facts.
            extra: events of the operator itself.
        """
        events = list(extra)
        if "events" in facts:
            metadata = observed.run["metadata"]
            mine = _object_names(observed)
            found = await self._warnings_of(metadata["namespace"])
            events += [event for event in found if _is_about(event, mine, metadata["name"])]
        nodes = await self._nodes.get() if "nodes" in facts and self._read_nodes else None
        return replace(observed, events=tuple(events), nodes=nodes)

    async def nodes_and_pods(self) -> tuple[tuple[Manifest, ...] | None, tuple[Manifest, ...] | None]:
        """Return the cluster's nodes, and all scheduled pods that have not ended; None if they may not be read."""
        if not self._read_nodes:
            return None, None
        return await self._nodes.get(), await self._pods.get()

    async def quotas(self, namespaces: Iterable[str]) -> dict[str, list[Manifest]]:
        """Return the ResourceQuotas by namespace; an empty list if they may not be read."""
        wanted = sorted(set(namespaces))
        self._quotas = {
            name: self._quotas.get(name) or _Shared(partial(self._list_quotas, name), self._clock) for name in wanted
        }
        return {name: await shared.get() for name, shared in list(self._quotas.items())}

    async def read_priorities(self, names: Iterable[str]) -> dict[str, int | str]:
        """Return the values of PriorityClasses by name; for an unreadable class, the reason and the fix as a text."""
        wanted = sorted(set(names))
        self._classes = {
            name: self._classes.get(name) or _Shared(partial(self._read_priority_class, name), self._clock)
            for name in wanted
        }
        return {name: await shared.get() for name, shared in list(self._classes.items())}

    async def _warnings_of(self, namespace: str) -> list[Manifest]:
        if namespace not in self._warnings:
            self._warnings = {name: kept for name, kept in self._warnings.items() if kept.is_current()}
            self._warnings[namespace] = _Shared(partial(self._list_warnings, namespace), self._clock)
        return await self._warnings[namespace].get()

    async def _list_warnings(self, namespace: str) -> tuple[list[Manifest], float]:
        found: list[Manifest] = []
        try:
            async for event in self._client.list(EVENT, namespace, fields="type=Warning"):
                event["metadata"] = {k: v for k, v in event["metadata"].items() if k != "managedFields"}
                found.append(event)
        except ApiError as error:
            log.warning("events of namespace %s cannot be read; messages explain less: %s", namespace, error)
            return [], FORBIDDEN_SECONDS
        except UnavailableError as error:  # clusters keep events in a separate etcd: its outage must not stop a run
            log.info("events of namespace %s were not read; the previous ones are used: %s", namespace, error)
            return self._warnings[namespace].last or [], LOOK_UP_SECONDS
        return found, LOOK_UP_SECONDS

    async def _list_quotas(self, namespace: str) -> tuple[list[Manifest], float]:
        try:
            return [quota async for quota in self._client.list(QUOTA, namespace)], QUOTA_SECONDS
        except ApiError as error:
            log.warning("quotas of namespace %s cannot be read, and the queue ignores them: %s", namespace, error)
            return [], FORBIDDEN_SECONDS

    async def _read_priority_class(self, name: str) -> tuple[int | str, float]:
        try:
            found = await self._client.get(PRIORITY_CLASS, None, name)
        except ApiError as error:
            log.info("PriorityClass %s cannot be read: %s", name, error)
            return (
                f"may not be read by this operator; put {name} into queue.priorityClasses of its chart",
                FORBIDDEN_SECONDS,
            )
        if found is None:
            return "does not exist; have it made, or name another one", LOOK_UP_SECONDS
        return int(found.get("value") or 0), CLASS_SECONDS

    async def _list_nodes(self) -> tuple[tuple[Manifest, ...] | None, float]:
        try:
            return tuple([_slim_node(node) async for node in self._client.list(NODE, None)]), LOOK_UP_SECONDS
        except ApiError as error:
            log.warning("nodes cannot be read (RLRUN_READ_NODES=false stops these reads): %s", error)
            return None, FORBIDDEN_SECONDS

    async def _list_pods(self) -> tuple[tuple[Manifest, ...] | None, float]:
        try:
            fields = "status.phase!=Succeeded,status.phase!=Failed,spec.nodeName!="
            return tuple([_slim_pod(pod) async for pod in self._client.list(POD, None, fields=fields)]), LOOK_UP_SECONDS
        except ApiError as error:
            log.warning(
                "pods of all namespaces cannot be read, and the queue cannot compute the free capacity: %s", error
            )
            return None, FORBIDDEN_SECONDS


class _Shared(Generic[T]):
    """Cached result of a read that many runs share: one request at a time, and a slower request is cached for longer.

    Args:
        ask: request; returns the result, and its minimum time in the cache in seconds.
        clock: returns steady seconds.
    """

    def __init__(self, ask: Callable[[], Awaitable[tuple[T, float]]], clock: Callable[[], float]) -> None:
        self._ask = ask
        self._clock = clock
        self._lock = asyncio.Lock()
        self._kept: tuple[T, float] | None = None

    @property
    def last(self) -> T | None:
        """The last result, even an expired one."""
        return self._kept[0] if self._kept is not None else None

    def is_current(self) -> bool:
        """Return whether the cached result is valid, or a request is running."""
        return self._lock.locked() or (self._kept is not None and self._clock() < self._kept[1])

    async def get(self) -> T:
        """Return the cached result, or read it."""
        async with self._lock:
            if self._kept is None or self._clock() >= self._kept[1]:
                # A slow answer is kept for longer, so that reads take at most a fixed share of the time.
                began = self._clock()
                answer, least = await self._ask()
                self._kept = answer, began + max(least, (self._clock() - began) / LOOK_UP_SHARE)
            return self._kept[0]


def _slim_node(node: Manifest) -> Manifest:
    """Return a node without images and managed fields, which are most of its size."""
    metadata = {k: v for k, v in node["metadata"].items() if k != "managedFields"}
    status = {k: v for k, v in (node.get("status") or {}).items() if k in ("capacity", "allocatable", "conditions")}
    return {**node, "metadata": metadata, "status": status}


def _slim_pod(pod: Manifest) -> Manifest:
    """Return the requests of a foreign pod, and its node."""
    metadata = {name: pod["metadata"][name] for name in ("name", "namespace", "labels") if name in pod["metadata"]}
    spec = pod.get("spec") or {}
    kept = {name: spec[name] for name in ("nodeName", "overhead", "resources") if name in spec}
    for group in ("containers", "initContainers"):
        kept[group] = [{k: c[k] for k in ("resources", "restartPolicy") if k in c} for c in spec.get(group) or ()]
    return {"metadata": metadata, "spec": kept, "status": {"phase": (pod.get("status") or {}).get("phase")}}


def _object_names(observed: Observed) -> set[str]:
    metadata = observed.run["metadata"]
    names = {pod["metadata"]["name"] for pod in observed.pods} | {ref.name for ref in observed.children}
    return names | {metadata["name"]}


def _is_about(event: Manifest, names: set[str], run: str) -> bool:
    """Return whether an event is about one of these objects, or about a ReplicaSet of the run, whose name is unknown."""
    subject = event.get("involvedObject") or {}
    if subject.get("kind") == "ReplicaSet":
        return str(subject.get("name", "")).startswith(f"{Names(run).inference}-")
    return subject.get("name") in names and subject.get("kind") != KIND
