"""Objects of an external queue, one for each run, and the clients, caches and callbacks that queues share.

The objects are listed every two seconds. They are not watched, because kopf needs the kind to exist when a watch starts, and a queue may be
installed later. Each write has the version on which its decision is based as a precondition, and the written object is stored in the cache
at once.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

from rlrun.backoff import backoff
from rlrun_operator.kube.client import ApiError, Client, UnavailableError
from rlrun_operator.kube.resources import Resource
from rlrun_operator.names import Ref
from rlrun_operator.providers.queue_answers import (
    Create,
    Edit,
    PutStatus,
    QueuedRun,
    Remove,
    Step,
    Write,
    name_of,
    refused_answer,
)
from rlrun_operator.reconcile.cache_feed import Feed
from rlrun_operator.reconcile.observe import LookUps
from rlrun_operator.runtime.cache import Key, Store
from rlrun_operator.runtime.watch_health import Stream
from rlrun_operator.state import Admission, Manifest, Refusal
from rlrun_operator.status import reasons
from rlrun_operator.status.claim_messages import refusal_fix


@dataclass(frozen=True)
class Cluster:
    """Clients, caches and callbacks of a queue."""

    client: Client
    store: Store
    feed: Feed
    look_ups: LookUps
    namespaces: tuple[str, ...]
    """Namespaces that the operator serves; empty: all."""
    serves: Callable[[Manifest], bool]
    """Returns whether this operator manages a run."""
    is_active: Callable[[], bool]
    """Returns whether this process acts on runs now (it is the leader)."""
    requeue: Callable[[Key, float], None]
    """`requeue(key, seconds)` queues a pass over a run."""
    now: Callable[[], float] = time.time
    """Seconds since the epoch."""
    clock: Callable[[], float] = time.monotonic
    """Steady seconds."""


LOOK_SECONDS = 2.0
"""Interval of the lists."""
LOOK_SHARE = 0.1
"""Largest share of the time that is spent on lists: thousands of objects are listed less often."""
STALE_SECONDS = 30.0
"""Maximum age of a list that a decision may use."""
RETRY_SECONDS, LONGEST_RETRY_SECONDS = 10.0, 60.0
"""Time until a refused write is retried; it doubles each time up to the second value."""
WRITES = 4
"""Maximum number of writes to one object in a pass."""
log = logging.getLogger(__name__)


class QueueObjects:
    """Objects of an external queue for the runs of an operator.

    Args:
        cluster: clients and caches.
        resource: kind of the objects.
        why_absent: returns the message for a refused list: the queue is not installed, or a permission is missing.
        on_list: callback with the UIDs of all runs after each list.
    """

    def __init__(
        self,
        cluster: Cluster,
        resource: Resource,
        *,
        why_absent: Callable[[ApiError], str],
        on_list: Callable[[set[str]], None] = lambda uids: None,
    ) -> None:
        self._cluster = cluster
        self._resource = resource
        self._why_absent = why_absent
        self._on_list = on_list
        self._listed_at: dict[str | None, float] = {}
        self._absent: dict[str | None, str] = {}
        """Reason why the objects of a namespace (None: all namespaces) cannot be listed; empty if they can."""
        self._tries: dict[str, int] = {}
        """Number of failed writes in a row, by the run's UID."""
        self._lock = asyncio.Lock()

    async def run(self) -> None:
        """List the objects periodically, and queue the runs with changed objects."""
        while True:
            began = self._cluster.clock()
            if self._cluster.is_active():
                for namespace in self._cluster.namespaces or (None,):
                    await self._list_objects(namespace)
            took = self._cluster.clock() - began
            await asyncio.sleep(max(LOOK_SECONDS, took / LOOK_SHARE))

    def get(self, namespace: str, name: str) -> Manifest | None:
        """Return an object from the cache."""
        return self._cluster.store.get(self._resource.kind, namespace, name)

    def absence_reason(self, namespace: str) -> str:
        """Return the reason why the objects of a namespace cannot be listed; empty if they can."""
        return self._absent.get(self._listed_namespace(namespace), "")

    async def ensure_listed(self, namespace: str) -> None:
        """List the objects of a namespace if the last list is too old.

        Raises:
            UnavailableError: the objects cannot be listed now.
        """
        place = self._listed_namespace(namespace)
        async with self._lock:
            if self._cluster.clock() - self._listed_at.get(place, float("-inf")) < STALE_SECONDS:
                return
            await self._list_objects(place)
        if not self._absent.get(place) and place not in self._listed_at:
            raise UnavailableError(f"{self._resource.plural}.{self._resource.group} cannot be listed")

    async def write_until_current(
        self, run: QueuedRun, step: Callable[[Manifest | None], Awaitable[Step]]
    ) -> Admission:
        """Write the run's object until it is up to date, and return the answer of its last state.

        Args:
            run: the run.
            step: returns the answer and the next write for the cached object, or for None.
        """
        key, name = (run.namespace, run.name), name_of(run.name, run.uid)
        for _ in range(WRITES):
            made = await step(self.get(run.namespace, name))
            if made.write is None:
                self._tries.pop(run.uid, None)
                return made.answer
            try:
                await self._make_write(run.namespace, name, made.write)
            except (ApiError, UnavailableError) as error:
                tries = self._tries[run.uid] = self._tries.get(run.uid, 0) + 1
                wait = backoff(tries, first=RETRY_SECONDS, longest=LONGEST_RETRY_SECONDS)
                self._cluster.requeue(key, wait)
                what = f"its {self._resource.kind} could not be written; retry in {wait:g} s"
                log.warning("run %s/%s: %s: %s", *key, what, error)
                return self._answer_after_failure(run, made, made.write, error)
        # The external queue changes the object as fast as it is written. The last answer holds, and the rest
        # follows in a later pass.
        self._cluster.requeue(key, LOOK_SECONDS)
        return made.answer

    def _answer_after_failure(
        self, run: QueuedRun, made: Step, write: Write, error: ApiError | UnavailableError
    ) -> Admission:
        """Return the answer after a failed write: a run without an object waits, and an admitted run keeps its admission."""
        kind = self._resource.kind
        if isinstance(write, Create) and not made.answer.admitted:
            helps = f"; {refusal_fix(error.message)}" if isinstance(error, ApiError) else ""
            return refused_answer(reasons.QUEUE_UNAVAILABLE, f"the run's {kind} is not taken: {error}{helps}")
        # The answer was made from a state before the write, and stays valid if the write is late.
        if isinstance(error, UnavailableError):
            return made.answer
        doing = {Create: "be made again", Remove: "be deleted"}.get(type(write), "be changed")
        ref = Ref(kind, name_of(run.name, run.uid))
        return replace(made.answer, refused=(Refusal(ref, error.message, doing),))

    async def _make_write(self, namespace: str, name: str, write: Write) -> None:
        """Make a write. If the object differs from the cached one, update the cache instead, so that the next step decides again."""
        client = self._cluster.client
        # A name that is taken is no error: the object is read, and the next step decides on it.
        if isinstance(write, Create):
            made = await client.create(write.manifest)
            self._store_object(made if made is not None else await client.get(self._resource, namespace, name))
            return
        known = self.get(namespace, name)
        # The decision is based on the cached object, and the list may be two seconds old. If the object has
        # changed since, it is decided again instead of written.
        live = await client.get(self._resource, namespace, name)
        if live is None:
            self._remove_object(namespace, name, known)
            return
        if known is None or live["metadata"]["resourceVersion"] != known["metadata"]["resourceVersion"]:
            self._store_object(live)  # decide again, on this state
            return
        version = {each: live["metadata"][each] for each in ("uid", "resourceVersion")}
        try:
            if isinstance(write, PutStatus):
                self._store_object(
                    await client.put_status(self._resource, namespace, name, {**live, "status": write.status})
                )
            elif isinstance(write, Edit):
                patch = {**write.patch, "metadata": {**(write.patch.get("metadata") or {}), **version}}
                self._store_object(await client.merge_patch(self._resource, namespace, name, patch))
            else:
                await client.delete(self._resource, namespace, name, uid=str(version["uid"]))
                self._after_deletion(namespace, name, known, await client.get(self._resource, namespace, name))
        except ApiError as error:
            if error.kept_out or error.status not in (404, 409):
                raise
            found = await client.get(self._resource, namespace, name)
            self._after_deletion(namespace, name, known, found)

    def _after_deletion(self, namespace: str, name: str, known: Manifest, found: Manifest | None) -> None:
        if found is None or found["metadata"]["uid"] != known["metadata"]["uid"]:
            self._remove_object(namespace, name, known)
        self._store_object(found)

    def _store_object(self, found: Manifest | None) -> None:
        if found is not None:
            known = {**found, "apiVersion": self._resource.api_version, "kind": self._resource.kind}
            self._cluster.store.put(known, self._cluster.now())

    def _remove_object(self, namespace: str, name: str, known: Manifest | None) -> None:
        uid = known["metadata"]["uid"] if known is not None else None
        self._cluster.store.remove(self._resource.kind, namespace, name, uid)

    def _listed_namespace(self, namespace: str) -> str | None:
        """Return the listed namespace, or None if all namespaces are listed together."""
        return namespace if self._cluster.namespaces else None

    async def _list_objects(self, namespace: str | None) -> None:
        before = self._absent.get(namespace, "")
        try:
            await self._cluster.feed.compare_stream(Stream(self._resource, namespace))
        except ApiError as error:
            self._absent[namespace] = self._why_absent(error)
        except UnavailableError as error:
            log.info("%s were not listed: %s", self._resource.plural, error)
            return
        else:
            self._absent[namespace] = ""
            self._listed_at[namespace] = self._cluster.clock()
        runs = self._cluster.store.runs()
        uids = {str(run["metadata"]["uid"]) for run in runs}
        self._tries = {uid: tries for uid, tries in self._tries.items() if uid in uids}
        # Answers, needs and tries are kept by UID, so that a run of the same name does not inherit them.
        self._on_list(uids)
        if self._absent[namespace] != before:
            for run in runs:
                self._cluster.requeue((run["metadata"]["namespace"], run["metadata"]["name"]), 0.0)
