"""Queue of Volcano: reads PodGroups and Queues, gets the next step from `providers.volcano.next_step`, and makes its writes."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import NamedTuple

from rlrun.api.resource import RLRunSpec
from rlrun_operator.decide.snapshot import RunSnapshot
from rlrun_operator.kube.client import ApiError
from rlrun_operator.kube.resources import EVENT, POD_GROUP, VOLCANO_QUEUE
from rlrun_operator.providers import Step, Subject, volcano
from rlrun_operator.providers.kueue_workload import name_of, refused_answer
from rlrun_operator.queue.packing import gang_of
from rlrun_operator.reconcile.kueue_queue import began_before, subject_of
from rlrun_operator.reconcile.observe import observe_run
from rlrun_operator.reconcile.queue_objects import LOOK_SECONDS, Cluster, QueueObjects
from rlrun_operator.render import render_workloads
from rlrun_operator.settings import QueueSettings, RenderSettings
from rlrun_operator.sharing import host_name
from rlrun_operator.state import Admission, Json, Manifest
from rlrun_operator.status import reasons

READ_SECONDS = 10.0
"""Time for which a Queue, and Volcano's message about a PodGroup, are cached. A missing message is cached for `LOOK_SECONDS`."""
_NO_PODS = "0/0 tasks"
"""Start of Volcano's message about every group without pods, which does not explain a wait."""
log = logging.getLogger(__name__)


class _Read(NamedTuple):
    found: volcano.QueueState
    until: float


class VolcanoQueue:
    """Answers of Volcano for runs; each run has a PodGroup in its Queue."""

    def __init__(self, cluster: Cluster, settings: QueueSettings, render: RenderSettings) -> None:
        self._cluster = cluster
        self._settings = settings
        self._render = render
        self._objects = QueueObjects(cluster, POD_GROUP, why_absent=_why_absent, on_look=self._drop_deleted_runs)
        self._queues: dict[str, _Read] = {}
        """States of Queues by name. Entries are replaced and never removed, because a cluster has few Queues."""
        self._told: dict[str, tuple[str, float]] = {}
        """Volcano's last message and the time until which it is cached, by the PodGroup's UID."""
        self._members: dict[str, tuple[object, tuple[Json, ...]]] = {}
        """Inputs and result of `members_of`, by the run's UID."""

    async def run(self) -> None:
        """List PodGroups periodically, and queue the runs with changed PodGroups."""
        await self._objects.run()

    async def answer(self, run: Manifest) -> Admission | None:
        """Return the answer for one run, or None if the run does not use a queue of Volcano.

        Raises:
            UnavailableError: the PodGroup or its Queue cannot be read now.
        """
        metadata = run["metadata"]
        key = (str(metadata["namespace"]), str(metadata["name"]))
        await self._objects.ensure_listed(key[0])
        # `run` may be older than the list that was awaited, so the run is observed again. It may also be deleted meanwhile. A guest runs in
        # the pods of its host, the run whose trainer it shares, so it has no PodGroup.
        found = observe_run(self._cluster.store, key)
        if found is None or host_name(run) is not None:
            return None
        # No key and no random number are needed: this snapshot starts no attempt.
        snapshot = RunSnapshot(found, self._cluster.now(), self._render, "", 0.0)
        # A run that started without a queue, such as before the queue was set up, uses no queue until it is suspended or ends.
        if began_before(snapshot) and self._objects.get(key[0], name_of(key[1], str(metadata["uid"]))) is None:
            return None
        subject = subject_of(snapshot, self._queue_of(run), self._members_of(snapshot))
        # Without the queue's objects no run may start, but a run with pods or a recorded admission (`holds`) keeps its resources.
        if absent := self._objects.absence_reason(key[0]):
            if not subject.holds:
                return refused_answer(reasons.QUEUE_UNAVAILABLE, absent)
            kept = Admission(True, reasons.ROOM_FOUND, f"the run keeps its resources: {absent}")
            return replace(kept, placed=volcano.pod_additions(subject))
        # No event reports the end of a suspended run's pods, after which its PodGroup must be deleted, so the run is observed again.
        if subject.suspended and subject.holds:
            self._cluster.again(key, LOOK_SECONDS)
        return await self._objects.write_until_current(subject, self._next_step)

    def _queue_of(self, run: Manifest) -> str:
        """Return the Queue of a run: `spec.queueName`, or the Queue in the values of the operator's Helm chart, or Volcano's default."""
        own = (run.get("spec") or {}).get("queueName")
        named = own if isinstance(own, str) else ""
        return named or self._settings.name or volcano.DEFAULT_QUEUE

    async def _next_step(self, run: Subject) -> Step:
        """Read the run's PodGroup, and for a waiting run the reasons of the wait; return the answer and the next write.

        The Queue and the events only explain a wait, so they are not read for other runs or for a group whose pods Volcano already allows.
        """
        group = self._objects.get(run.namespace, name_of(run.name, run.uid))
        waits = not (run.has_pods or run.over or run.suspended)
        if not waits or (group is not None and volcano.phase_of(group) in volcano.BEGUN):
            return volcano.next_step(run, group)
        told = await self._read_last_message(group) if group is not None else ""
        return volcano.next_step(run, group, queue=await self._read_queue_state(run.queue), event_text=told)

    async def _read_queue_state(self, name: str) -> volcano.QueueState:
        """Return the state of a Queue; unknown if it may not be read."""
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

    async def _read_last_message(self, group: Manifest) -> str:
        """Return Volcano's last message why a PodGroup is Pending; only an event contains it."""
        metadata = group["metadata"]
        known = self._told.get(metadata["uid"])
        if known is not None and self._cluster.clock() < known[1]:
            return known[0]
        fields = f"involvedObject.kind={POD_GROUP.kind},involvedObject.name={metadata['name']}"
        last: tuple[str, str] = "", ""
        try:
            async for event in self._cluster.client.list(EVENT, str(metadata["namespace"]), fields=fields):
                message = str(event.get("message") or "").strip()
                # The selector is a name, so the list may contain events of a deleted group. An event without a UID is kept.
                about = (event.get("involvedObject") or {}).get("uid") in (None, "", metadata["uid"])
                if event.get("reason") == "Unschedulable" and about and not message.startswith(_NO_PODS):
                    # Both fields are UTC in RFC 3339, whose order as text is the order of time, except within one second.
                    last = max(last, (str(event.get("lastTimestamp") or event.get("eventTime") or ""), message))
        except ApiError as error:
            log.info("events of PodGroup %s were not read: %s", metadata["name"], error)
        believed = READ_SECONDS if last[1] else LOOK_SECONDS
        self._told[metadata["uid"]] = last[1], self._cluster.clock() + believed
        return last[1]

    def _drop_deleted_runs(self, uids: set[str]) -> None:
        """Remove deleted runs and expired messages from the caches."""
        now = self._cluster.clock()
        self._members = {uid: kept for uid, kept in self._members.items() if uid in uids}
        self._told = {uid: kept for uid, kept in self._told.items() if now < kept[1]}

    def _members_of(self, snapshot: RunSnapshot) -> tuple[Json, ...]:
        """Return `members_of`, or no pods for an invalid specification.

        The result is cached until one of its inputs changes, because rendering takes as long as all other work of a pass over the run.
        """
        uid, spec = str(snapshot.metadata["uid"]), snapshot.spec
        if spec is None:
            return ()
        mark = (snapshot.generation, snapshot.spec_hash, snapshot.wanted.trainers, snapshot.wanted.engines_needed)
        known = self._members.get(uid)
        if known is None or known[0] != mark:
            known = self._members[uid] = (mark, members_of(snapshot, spec))
        return known[1]


def members_of(snapshot: RunSnapshot, spec: RLRunSpec) -> tuple[Json, ...]:
    """Return the pods of each role without which a run cannot work. Volcano admits the run when all of them fit.

    The workloads are rendered for the newest attempt, or for attempt 1 of a run without attempts. Engines and pods of an
    elastic trainer count with their minimum.
    """
    made = render_workloads(snapshot.context(spec, max(snapshot.attempt, 1))).existing
    trainers = spec.trainer.elastic.min if spec.trainer.elastic is not None else None
    return tuple(
        {
            "name": pods.role,
            "count": pods.count if pods.least is None else min(pods.least, pods.count),
            # `requests_of` adds one unit of a node's resource "pods", which is not a request of a container.
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
