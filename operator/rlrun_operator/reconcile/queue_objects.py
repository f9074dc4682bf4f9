"""Objects of a queue of others, one for each run: listed every other second, and written on the very state that was decided on.

They are not watched: kopf's watches need the kind to be there when they begin, and a queue may be installed later. What was written is
in the store at once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace

from rlrun.backoff import backoff
from rlrun_operator.kube.client import ApiError, UnavailableError
from rlrun_operator.kube.resources import Resource
from rlrun_operator.names import Ref
from rlrun_operator.providers import Create, Edit, PutStatus, Remove, Step, Subject, Write
from rlrun_operator.providers.words import refused_answer
from rlrun_operator.providers.workload import name_of
from rlrun_operator.reconcile.surroundings import Cluster
from rlrun_operator.runtime.watch_health import Stream
from rlrun_operator.state import Admission, Manifest, Refusal
from rlrun_operator.status import reasons
from rlrun_operator.status.admission_limits import refusal_fix

LOOK_SECONDS = 2.0
"""They are listed this often."""
LOOK_SHARE = 0.1
"""Largest share of the time that is spent on lists: those of thousands of runs come less often."""
STALE_SECONDS = 30.0
"""A list that is older is not decided on."""
RETRY_SECONDS, LONGEST_RETRY_SECONDS = 10.0, 60.0
"""A write that a webhook of the queue's or the API server did not take is tried again after this long, doubled each time."""
WRITES = 4
"""Writes to one object in a pass."""
log = logging.getLogger(__name__)


class QueueObjects:
    """Workloads of Kueue, or PodGroups of Volcano, of the runs that an operator serves.

    Args:
        why_absent: words for a list that is refused: the queue is not installed, or a right is missing.
        on_look: called with the UIDs of all runs after each list.
    """

    def __init__(
        self,
        cluster: Cluster,
        resource: Resource,
        *,
        why_absent: Callable[[ApiError], str],
        on_look: Callable[[set[str]], None] = lambda uids: None,
    ) -> None:
        self._cluster = cluster
        self._resource = resource
        self._why_absent = why_absent
        self._on_look = on_look
        self._listed_at: dict[str | None, float] = {}
        self._absent: dict[str | None, str] = {}
        """Why those of a namespace, or of all, cannot be listed."""
        self._tries: dict[str, int] = {}
        """Writes in a row that did not succeed, by the run's UID."""
        self._lock = asyncio.Lock()

    async def run(self) -> None:
        """List them again and again, which wakes the runs whose own has changed."""
        while True:
            began = self._cluster.clock()
            if self._cluster.is_active():
                for namespace in self._cluster.namespaces or (None,):
                    await self._look(namespace)
            took = self._cluster.clock() - began
            await asyncio.sleep(max(LOOK_SECONDS, took / LOOK_SHARE))

    def get(self, namespace: str, name: str) -> Manifest | None:
        """One of them, as it is known."""
        return self._cluster.store.get(self._resource.kind, namespace, name)

    def absent(self, namespace: str) -> str:
        """Reason why those of a namespace cannot be listed; empty: they can."""
        return self._absent.get(self._place(namespace), "")

    async def fresh(self, namespace: str) -> None:
        """See to it that they were listed a moment ago.

        Raises:
            UnavailableError: they cannot be listed now.
        """
        place = self._place(namespace)
        async with self._lock:
            if self._cluster.clock() - self._listed_at.get(place, float("-inf")) < STALE_SECONDS:
                return
            await self._look(place)
        if not self._absent.get(place) and place not in self._listed_at:
            raise UnavailableError(f"{self._resource.plural}.{self._resource.group} cannot be listed")

    async def obeyed(self, run: Subject, step: Callable[[Subject], Awaitable[Step]]) -> Admission:
        """Write until nothing is left to write; the answer is that of the last state.

        Args:
            run: a run.
            step: reads its object as it is known now; the answer, and the next write.
        """
        key = (run.namespace, run.name)
        for _ in range(WRITES):
            made = await step(run)
            if made.write is None:
                self._tries.pop(run.uid, None)
                return made.answer
            try:
                await self._write(run.namespace, name_of(run.name, run.uid), made.write)
            except (ApiError, UnavailableError) as error:
                tries = self._tries[run.uid] = self._tries.get(run.uid, 0) + 1
                wait = backoff(tries, first=RETRY_SECONDS, longest=LONGEST_RETRY_SECONDS)
                self._cluster.again(key, wait)
                what = f"its {self._resource.kind} could not be written; retry in {wait:g} s"
                log.warning("run %s/%s: %s: %s", *key, what, error)
                return self._unwritten(run, made, made.write, error)
        self._cluster.again(key, LOOK_SECONDS)
        return made.answer

    def _unwritten(self, run: Subject, made: Step, write: Write, error: ApiError | UnavailableError) -> Admission:
        """The answer while a write does not succeed: a run that has no object waits, and one that has what it needs keeps it."""
        kind = self._resource.kind
        if isinstance(write, Create) and not made.answer.admitted:
            helps = f"; {refusal_fix(error.message)}" if isinstance(error, ApiError) else ""
            return refused_answer(reasons.QUEUE_UNAVAILABLE, f"the run's {kind} is not taken: {error}{helps}")
        if isinstance(error, UnavailableError):
            return made.answer
        doing = {Create: "be made again", Remove: "be deleted"}.get(type(write), "be changed")
        ref = Ref(kind, name_of(run.name, run.uid))
        return replace(made.answer, refused=(Refusal(ref, error.message, doing),))

    async def _write(self, namespace: str, name: str, write: Write) -> None:
        """Carry out a write. One that meets another state than the one that is known leaves it alone and learns it."""
        client = self._cluster.client
        if isinstance(write, Create):
            made = await client.create(write.manifest)
            self._learn(made if made is not None else await client.get(self._resource, namespace, name))
            return
        known = self.get(namespace, name)
        live = await client.get(self._resource, namespace, name)
        if live is None:
            self._forget(namespace, name, known)
            return
        if known is None or live["metadata"]["resourceVersion"] != known["metadata"]["resourceVersion"]:
            self._learn(live)  # decide again, on this state
            return
        version = {each: live["metadata"][each] for each in ("uid", "resourceVersion")}
        try:
            if isinstance(write, PutStatus):
                self._learn(await client.put_status(self._resource, namespace, name, {**live, "status": write.status}))
            elif isinstance(write, Edit):
                patch = {**write.patch, "metadata": {**(write.patch.get("metadata") or {}), **version}}
                self._learn(await client.merge(self._resource, namespace, name, patch))
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
            self._forget(namespace, name, known)
        self._learn(found)

    def _learn(self, found: Manifest | None) -> None:
        if found is not None:
            known = {**found, "apiVersion": self._resource.api_version, "kind": self._resource.kind}
            self._cluster.store.put(known, self._cluster.now())

    def _forget(self, namespace: str, name: str, known: Manifest | None) -> None:
        uid = known["metadata"]["uid"] if known is not None else None
        self._cluster.store.remove(self._resource.kind, namespace, name, uid)

    def _place(self, namespace: str) -> str | None:
        """Place that is listed for a namespace."""
        return namespace if self._cluster.namespaces else None

    async def _look(self, namespace: str | None) -> None:
        before = self._absent.get(namespace, "")
        try:
            await self._cluster.feed.compare(Stream(self._resource, namespace))
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
        self._on_look(uids)
        if self._absent[namespace] != before:
            for run in runs:
                self._cluster.again((run["metadata"]["namespace"], run["metadata"]["name"]), 0.0)
