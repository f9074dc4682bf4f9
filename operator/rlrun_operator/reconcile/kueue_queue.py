"""Kueue's edge: reads Workloads, asks `providers.step`, and carries out its writes.

Workloads are listed every other second and not watched: kopf's watches need the kind to be there when they begin, and Kueue may be
installed later. What was written is in the store at once.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from typing import Literal

from rlrun.api.resource import RLRunSpec
from rlrun_operator.decide import queueing
from rlrun_operator.decide.snapshot import Case, has_let_go
from rlrun_operator.kube.client import ApiError, UnavailableError
from rlrun_operator.kube.resources import WORKLOAD
from rlrun_operator.providers import Create, Edit, PutStatus, Step, Subject, Write, step
from rlrun_operator.providers.assigned import flavors_of
from rlrun_operator.providers.words import refused
from rlrun_operator.providers.workload import QUEUE_LABEL, name_of, pod_sets
from rlrun_operator.reconcile.kueue_classes import Classes, UnknownError
from rlrun_operator.reconcile.observe import observe
from rlrun_operator.reconcile.surroundings import Cluster
from rlrun_operator.render import workloads
from rlrun_operator.runtime.cache import Key
from rlrun_operator.runtime.watch_health import Stream
from rlrun_operator.settings import QueueSettings, RenderSettings
from rlrun_operator.sharing import host_name
from rlrun_operator.state import Admission, Json, Manifest
from rlrun_operator.status import reasons
from rlrun_operator.status.conditions import find, is_true

LOOK_SECONDS = 2.0
"""Workloads are listed this often."""
LOOK_SHARE = 0.1
"""Largest share of the time that is spent on lists: those of thousands of runs come less often."""
STALE_SECONDS = 30.0
"""A list that is older is not decided on."""
RETRY_SECONDS = 10.0
"""A write that Kueue's webhook or the API server did not take is tried again after this long."""
WRITES = 4
"""Writes to one Workload in a pass."""
_OUTCOMES: dict[str, Literal["Succeeded", "Failed"]] = {"Complete": "Succeeded", "Failed": "Failed"}
log = logging.getLogger(__name__)


class KueueQueue:
    """Answers of Kueue for runs that name one of its LocalQueues."""

    def __init__(self, cluster: Cluster, settings: QueueSettings, render: RenderSettings) -> None:
        self._cluster = cluster
        self._settings = settings
        self._render = render
        self._listed_at: dict[str | None, float] = {}
        self._absent: dict[str | None, str] = {}
        """Why Workloads of a namespace, or of all, cannot be listed."""
        self._lock = asyncio.Lock()
        self._classes = Classes(cluster.client, settings, cluster.clock)
        self._placed: dict[str, Admission] = {}
        """Last admission of each run that has one, by UID."""
        self._sets: dict[str, tuple[object, tuple[Json, ...]]] = {}

    async def run(self) -> None:
        """List Workloads again and again, which wakes the runs whose Workload has changed."""
        while True:
            began = self._cluster.clock()
            if self._cluster.is_active():
                for namespace in self._cluster.namespaces or (None,):
                    await self._look(namespace)
            took = self._cluster.clock() - began
            await asyncio.sleep(max(LOOK_SECONDS, took / LOOK_SHARE))

    async def answer(self, run: Manifest) -> Admission | None:
        """Answer for one run; None: it waits in no queue of Kueue.

        Raises:
            UnavailableError: what it has to rest on cannot be read now.
        """
        metadata = run["metadata"]
        key = (str(metadata["namespace"]), str(metadata["name"]))
        await self._fresh(key[0])
        queue = queue_of(run) or self._settings.name or self._queue_before(run)
        found = observe(self._cluster.store, key)
        if found is None or host_name(run) is not None or not queue:
            return None
        case = Case(found, self._cluster.now(), self._render, "", 0.0)
        if began_before(case) and not self._queue_before(run):
            return None
        subject = subject_of(case, queue, self._pod_sets(case))
        if absent := self._absent.get(self._place(key[0])):
            return self._without_kueue(subject, absent)
        try:
            subject = replace(subject, priority=await self._classes.priority(case.applied.run))
            if subject.suspended and subject.holds:
                self._cluster.again(
                    key, LOOK_SECONDS
                )  # no event comes when it is at rest, and its quota has to be given back
            return await self._obeyed(key, subject)
        except UnknownError as error:
            if (kept := self._placed.get(subject.uid)) is not None and subject.holds:
                return kept
            if subject.holds:
                raise UnavailableError(str(error)) from error
            return refused(reasons.QUEUE_MISCONFIGURED, str(error))

    def _queue_before(self, run: Manifest) -> str:
        """LocalQueue of a run's Workload: a run that names none any more stays where it is."""
        metadata = run["metadata"]
        name = name_of(str(metadata["name"]), str(metadata["uid"]))
        workload = self._cluster.store.get(WORKLOAD.kind, str(metadata["namespace"]), name)
        return str(((workload or {}).get("spec") or {}).get("queueName") or "")

    def _without_kueue(self, run: Subject, absent: str) -> Admission:
        """A run keeps what it has while Kueue's API is away: it may be away for a moment."""
        if not run.holds:
            return refused(reasons.QUEUE_UNAVAILABLE, absent)
        if (kept := self._placed.get(run.uid)) is None:
            raise UnavailableError(absent)
        return kept

    def _place(self, namespace: str) -> str | None:
        """Place that is listed for a namespace."""
        return namespace if self._cluster.namespaces else None

    async def _obeyed(self, key: Key, run: Subject) -> Admission:
        """Write until nothing is left to write; the answer is that of the last state."""
        for _ in range(WRITES):
            made = await self._step(run)
            if made.answer.admitted:
                self._placed[run.uid] = made.answer
            if made.write is None:
                return made.answer
            try:
                await self._write(run, made.write)
            except (ApiError, UnavailableError) as error:
                self._cluster.again(key, RETRY_SECONDS)
                log.warning(
                    "run %s/%s: its Workload could not be written; retry in %g s: %s", *key, RETRY_SECONDS, error
                )
                if isinstance(made.write, Create):
                    return refused(reasons.QUEUE_UNAVAILABLE, f"the run's Workload is not taken: {error}")
                return made.answer
        self._cluster.again(key, LOOK_SECONDS)
        return made.answer

    async def _step(self, run: Subject) -> Step:
        workload = self._workload(run)
        names = flavors_of(workload) if workload is not None else frozenset()
        flavors = {name: await self._classes.flavor(name) for name in sorted(names)}
        return step(run, workload, flavors=flavors, now=self._cluster.now())

    def _workload(self, run: Subject) -> Manifest | None:
        return self._cluster.store.get(WORKLOAD.kind, run.namespace, name_of(run.name, run.uid))

    async def _write(self, run: Subject, write: Write) -> None:
        client, namespace, name = self._cluster.client, run.namespace, name_of(run.name, run.uid)
        if isinstance(write, Create):
            made = await client.create(write.manifest)
            self._learn(made if made is not None else await client.get(WORKLOAD, namespace, name))
            return
        known = self._workload(run)
        live = await client.get(WORKLOAD, namespace, name)
        if live is None:
            self._forget(namespace, name, known)
            return
        if known is None or live["metadata"]["resourceVersion"] != known["metadata"]["resourceVersion"]:
            self._learn(live)  # decide again, on this state
            return
        version = {each: live["metadata"][each] for each in ("uid", "resourceVersion")}
        try:
            if isinstance(write, PutStatus):
                self._learn(await client.put_status(WORKLOAD, namespace, name, {**live, "status": write.status}))
            elif isinstance(write, Edit):
                patch = {**write.patch, "metadata": {**(write.patch.get("metadata") or {}), **version}}
                self._learn(await client.merge(WORKLOAD, namespace, name, patch))
            else:
                await client.delete(WORKLOAD, namespace, name, uid=str(version["uid"]))
                self._after_deletion(namespace, name, known, await client.get(WORKLOAD, namespace, name))
        except ApiError as error:
            if error.status not in (404, 409):
                raise
            found = await client.get(WORKLOAD, namespace, name)
            self._after_deletion(namespace, name, known, found)

    def _after_deletion(self, namespace: str, name: str, known: Manifest, found: Manifest | None) -> None:
        if found is None or found["metadata"]["uid"] != known["metadata"]["uid"]:
            self._forget(namespace, name, known)
        self._learn(found)

    def _learn(self, found: Manifest | None) -> None:
        if found is not None:
            known = {**found, "apiVersion": WORKLOAD.api_version, "kind": WORKLOAD.kind}
            self._cluster.store.put(known, self._cluster.now())

    def _forget(self, namespace: str, name: str, known: Manifest | None) -> None:
        uid = known["metadata"]["uid"] if known is not None else None
        self._cluster.store.remove(WORKLOAD.kind, namespace, name, uid)

    async def _fresh(self, namespace: str) -> None:
        """See to it that Workloads were listed a moment ago."""
        place = self._place(namespace)
        async with self._lock:
            if self._cluster.clock() - self._listed_at.get(place, float("-inf")) < STALE_SECONDS:
                return
            await self._look(place)
        if not self._absent.get(place) and place not in self._listed_at:
            raise UnavailableError("Kueue's Workloads cannot be listed")

    async def _look(self, namespace: str | None) -> None:
        before = self._absent.get(namespace, "")
        try:
            await self._cluster.feed.compare(Stream(WORKLOAD, namespace))
        except ApiError as error:
            self._absent[namespace] = _why_absent(error)
        except UnavailableError as error:
            log.info("Workloads were not listed: %s", error)
            return
        else:
            self._absent[namespace] = ""
            self._listed_at[namespace] = self._cluster.clock()
        runs = self._cluster.store.runs()
        known = {str(run["metadata"]["uid"]) for run in runs}
        self._placed = {uid: kept for uid, kept in self._placed.items() if uid in known}
        self._sets = {uid: kept for uid, kept in self._sets.items() if uid in known}
        if self._absent[namespace] != before:
            for run in runs:
                self._cluster.again((run["metadata"]["namespace"], run["metadata"]["name"]), 0.0)

    def _pod_sets(self, case: Case) -> tuple[Json, ...]:
        """Pod sets of the next attempt, without what an admission adds; made once for each edit, as rendering takes as long as a pass."""
        uid, spec = str(case.metadata["uid"]), case.spec
        if spec is None:
            return ()
        known = self._sets.get(uid)
        mark = (case.generation, case.spec_hash)
        if known is None or known[0] != mark:
            known = self._sets[uid] = (mark, sets_of(case, spec))
        return known[1]


def queue_of(run: Manifest) -> str:
    """LocalQueue that a run names; empty: it names none."""
    own = (run.get("spec") or {}).get("queueName")
    label = (run["metadata"].get("labels") or {}).get(QUEUE_LABEL)
    return own if isinstance(own, str) and own else str(label or "")


def began_before(case: Case) -> bool:
    """True if a run has pods that no queue has admitted: it keeps them until it is suspended or ends."""
    past = case.past
    if find(past.conditions, reasons.ADMITTED) is not None or is_true(past.conditions, reasons.SUSPENDED):
        return False
    return case.attempt > 0


def _why_absent(error: ApiError) -> str:
    if error.status == 404:
        return (
            f"Kueue is not installed: the cluster does not serve {WORKLOAD.plural}.{WORKLOAD.api_version}; install it, or set "
            "queue.provider of the operator's chart to another one"
        )
    return f"Kueue's Workloads may not be read: {error.message}; a helm upgrade of the operator's chart grants it"


def subject_of(case: Case, queue: str, sets: tuple[Json, ...]) -> Subject:
    """A run as Kueue sees it.

    Args:
        case: the run.
        queue: its LocalQueue.
        sets: pod sets of its next attempt.
    """
    past, uid = case.past, str(case.metadata["uid"])
    ended = _OUTCOMES.get(str(past.phase))
    live = [pod for pod in case.pods if pod.phase not in ("Succeeded", "Failed")]
    makes = case.deployment is not None or not has_let_go(case.statefulset)
    recorded = is_true(past.conditions, reasons.ADMITTED)
    engines = find(past.conditions, reasons.INFERENCE_AVAILABLE)
    suspended = find(past.conditions, reasons.SUSPENDED)
    stops = suspended is not None and suspended.reason == reasons.SUSPENDING  # a pod may not be seen yet
    at_rest = is_true(past.conditions, reasons.SUSPENDED) or is_true(past.conditions, reasons.RESTARTING)
    return Subject(
        name=case.names.run,
        namespace=str(case.metadata["namespace"]),
        uid=uid,
        queue=queue,
        pod_sets=sets,
        holds=bool(live) or makes or (ended is None and (recorded or stops)),
        begins=case.attempt == 0 or at_rest,
        engines=case.wanted.engines,
        suspended=queueing.shall_rest(case),
        ready=is_true(past.conditions, reasons.PODS_READY) and (engines is None or engines.status == "True"),
        over=ended,
        outcome=past.message or "",
    )


def sets_of(case: Case, spec: RLRunSpec) -> tuple[Json, ...]:
    """Pod sets of a run's next attempt, without what an admission adds and without the nodes that it avoids for a while.

    Where the number of engines follows the load, and of an elastic trainer, all that there may be: more than were admitted would stop
    the run.
    """
    sets = pod_sets(workloads(replace(case.context(spec, 1), spec=spec, placed={}, excluded=())).made)
    block = spec.inference.autoscale
    if block is None:
        return sets
    return tuple({**one, "count": block.max} if one["name"] == "inference" else one for one in sets)
