"""Volcano's edge: reads PodGroups and Queues, asks `providers.volcano.next_step`, and carries out its writes."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import NamedTuple

from rlrun.api.resource import RLRunSpec
from rlrun_operator.decide.snapshot import RunSnapshot
from rlrun_operator.kube.client import ApiError
from rlrun_operator.kube.resources import EVENT, POD_GROUP, VOLCANO_QUEUE
from rlrun_operator.providers import Step, Subject, volcano
from rlrun_operator.providers.words import refused_answer
from rlrun_operator.providers.workload import name_of
from rlrun_operator.queue.gang import gang_of
from rlrun_operator.reconcile.kueue_queue import began_before, subject_of
from rlrun_operator.reconcile.observe import observe_run
from rlrun_operator.reconcile.queue_objects import LOOK_SECONDS, QueueObjects
from rlrun_operator.reconcile.surroundings import Cluster
from rlrun_operator.render import render_workloads
from rlrun_operator.settings import QueueSettings, RenderSettings
from rlrun_operator.sharing import host_name
from rlrun_operator.state import Admission, Json, Manifest
from rlrun_operator.status import reasons

READ_SECONDS = 10.0
"""A Queue, and Volcano's words about a PodGroup, are believed this long."""
_NO_PODS = "0/0 tasks"
"""Beginning of what Volcano says in every session of a group that has no pods yet, which explains nothing."""
log = logging.getLogger(__name__)


class _Read(NamedTuple):
    found: volcano.QueueState
    until: float


class VolcanoQueue:
    """Answers of Volcano for runs, each with a PodGroup in the Queue that it names."""

    def __init__(self, cluster: Cluster, settings: QueueSettings, render: RenderSettings) -> None:
        self._cluster = cluster
        self._settings = settings
        self._render = render
        self._objects = QueueObjects(cluster, POD_GROUP, why_absent=_why_absent, on_look=self._keep)
        self._queues: dict[str, _Read] = {}
        self._told: dict[str, tuple[str, float]] = {}
        self._members: dict[str, tuple[object, tuple[Json, ...]]] = {}

    async def run(self) -> None:
        """List PodGroups again and again, which wakes the runs whose PodGroup has changed."""
        await self._objects.run()

    async def answer(self, run: Manifest) -> Admission | None:
        """Answer for one run; None: it waits in no queue of Volcano.

        Raises:
            UnavailableError: what it has to rest on cannot be read now.
        """
        metadata = run["metadata"]
        key = (str(metadata["namespace"]), str(metadata["name"]))
        await self._objects.fresh(key[0])
        found = observe_run(self._cluster.store, key)
        if found is None or host_name(run) is not None:
            return None
        snapshot = RunSnapshot(found, self._cluster.now(), self._render, "", 0.0)
        if began_before(snapshot) and self._objects.get(key[0], name_of(key[1], str(metadata["uid"]))) is None:
            return None
        subject = subject_of(snapshot, self._queue_of(run), self._members_of(snapshot))
        if absent := self._objects.absent(key[0]):
            if not subject.holds:
                return refused_answer(reasons.QUEUE_UNAVAILABLE, absent)
            kept = Admission(True, reasons.ROOM_FOUND, f"the run keeps what it has: {absent}")
            return replace(kept, placed=volcano.pod_additions(subject))
        if subject.suspended and subject.holds:
            self._cluster.again(key, LOOK_SECONDS)  # no event comes when it is at rest, and its PodGroup has to go
        return await self._objects.obeyed(subject, self._step)

    def _queue_of(self, run: Manifest) -> str:
        """Queue that a run names, or the chart's, or Volcano's own."""
        own = (run.get("spec") or {}).get("queueName")
        named = own if isinstance(own, str) else ""
        return named or self._settings.name or volcano.DEFAULT_QUEUE

    async def _step(self, run: Subject) -> Step:
        group = self._objects.get(run.namespace, name_of(run.name, run.uid))
        waits = not (run.has_pods or run.over or run.suspended)
        if not waits or (group is not None and volcano.phase_of(group) in volcano.BEGUN):
            return volcano.next_step(run, group)
        told = await self._words(group) if group is not None else ""
        return volcano.next_step(run, group, queue=await self._state(run.queue), event_text=told)

    async def _state(self, name: str) -> volcano.QueueState:
        """A Queue, as far as it may be read."""
        known = self._queues.get(name)
        if known is not None and self._cluster.clock() < known.until:
            return known.found
        try:
            found = await self._cluster.client.get(VOLCANO_QUEUE, None, name)
            state = volcano.QueueState(found is not None, str(((found or {}).get("status") or {}).get("state") or ""))
        except ApiError as error:
            if not error.lacks_permission:
                raise
            state = volcano.QueueState()
        self._queues[name] = _Read(state, self._cluster.clock() + READ_SECONDS)
        return state

    async def _words(self, group: Manifest) -> str:
        """Volcano's last words for why it takes a PodGroup that is Pending not yet: they are in an event alone."""
        metadata = group["metadata"]
        known = self._told.get(metadata["uid"])
        if known is not None and self._cluster.clock() < known[1]:
            return known[0]
        fields = f"involvedObject.kind={POD_GROUP.kind},involvedObject.name={metadata['name']}"
        last: tuple[str, str] = "", ""
        try:
            async for event in self._cluster.client.list(EVENT, str(metadata["namespace"]), fields=fields):
                message = str(event.get("message") or "").strip()
                about = (event.get("involvedObject") or {}).get("uid") in (None, "", metadata["uid"])
                if event.get("reason") == "Unschedulable" and about and not message.startswith(_NO_PODS):
                    last = max(last, (str(event.get("lastTimestamp") or event.get("eventTime") or ""), message))
        except ApiError as error:
            log.info("events of PodGroup %s were not read: %s", metadata["name"], error)
        believed = READ_SECONDS if last[1] else LOOK_SECONDS
        self._told[metadata["uid"]] = last[1], self._cluster.clock() + believed
        return last[1]

    def _keep(self, uids: set[str]) -> None:
        """Forget runs that are gone, and what was read long ago."""
        now = self._cluster.clock()
        self._members = {uid: kept for uid, kept in self._members.items() if uid in uids}
        self._told = {uid: kept for uid, kept in self._told.items() if now < kept[1]}

    def _members_of(self, snapshot: RunSnapshot) -> tuple[Json, ...]:
        """Pods without which the next attempt does not go on; rendered once for each edit, as that takes as long as a pass."""
        uid, spec = str(snapshot.metadata["uid"]), snapshot.spec
        if spec is None:
            return ()
        mark = (snapshot.generation, snapshot.spec_hash, snapshot.wanted.trainers, snapshot.wanted.engines_needed)
        known = self._members.get(uid)
        if known is None or known[0] != mark:
            known = self._members[uid] = (mark, members_of(snapshot, spec))
        return known[1]


def members_of(snapshot: RunSnapshot, spec: RLRunSpec) -> tuple[Json, ...]:
    """Pods without which a run's next attempt does not go on, by role."""
    made = render_workloads(snapshot.context(spec, max(snapshot.attempt, 1))).existing
    trainers = spec.trainer.elastic.min if spec.trainer.elastic is not None else None
    return tuple(
        {
            "name": pods.role,
            "count": pods.count if pods.least is None else min(pods.least, pods.count),
            "requests": {name: amount for name, amount in pods.requests.items() if name != "pods"},
            "priorityClassName": str(pods.spec.get("priorityClassName") or ""),
        }
        for pods in gang_of(made, engines_needed=snapshot.wanted.engines_needed, trainers_needed=trainers)
    )


def _why_absent(error: ApiError) -> str:
    if error.status == 404:
        return (
            f"Volcano is not installed: the cluster does not serve {POD_GROUP.plural}.{POD_GROUP.api_version}; install it, or set "
            "queue.provider of the operator's chart to another one"
        )
    return f"Volcano's PodGroups may not be read: {error.message}; a helm upgrade of the operator's chart grants it"
