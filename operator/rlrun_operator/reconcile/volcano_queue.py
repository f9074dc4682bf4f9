"""Volcano as an external queue: its names, the needs of a run in its form, and the reads of Queues and of events about PodGroups.

The next write of a PodGroup comes from `providers.volcano.next_step`.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import NamedTuple

from rlrun.api.resource import RLRunSpec
from rlrun_operator.decide.snapshot import RunSnapshot
from rlrun_operator.kube.client import ApiError
from rlrun_operator.kube.resources import EVENT, POD_GROUP, VOLCANO_QUEUE
from rlrun_operator.providers import volcano
from rlrun_operator.providers.queue_answers import QueuedRun, Step
from rlrun_operator.queue.packing import gang_of
from rlrun_operator.reconcile.external_queue import QueueAdapter
from rlrun_operator.reconcile.queue_objects import LOOK_SECONDS, Cluster
from rlrun_operator.render import render_workloads
from rlrun_operator.settings import QueueSettings
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


class VolcanoAdapter(QueueAdapter):
    """Volcano: a run has a PodGroup in a Queue.

    Args:
        cluster: clients and caches.
        settings: settings of the queue.
    """

    resource = POD_GROUP

    def __init__(self, cluster: Cluster, settings: QueueSettings) -> None:
        self._cluster = cluster
        self._settings = settings
        self._queues: dict[str, _Read] = {}
        """States of Queues by name. Entries are replaced and never removed, because a cluster has few Queues."""
        self._messages: dict[str, tuple[str, float]] = {}
        """Volcano's last message and the time until which it is cached, by the PodGroup's UID."""

    def explain_absence(self, error: ApiError) -> str:
        """Return why PodGroups cannot be listed."""
        if error.status == 404:
            return (
                f"Volcano is not installed: the cluster does not serve {POD_GROUP.plural}.{POD_GROUP.api_version}; install it, or set "
                "queue.provider of the operator's chart to another one"
            )
        return f"Volcano's PodGroups may not be read: {error.message}; a helm upgrade of the operator's chart grants it"

    def queue_name(self, run: Manifest, held: Manifest | None) -> str:
        """Return the Queue of a run: `spec.queueName`, or the Queue in the values of the operator's Helm chart, or Volcano's default."""
        own = (run.get("spec") or {}).get("queueName")
        named = own if isinstance(own, str) else ""
        return named or self._settings.name or volcano.DEFAULT_QUEUE

    def render_needs(self, snapshot: RunSnapshot, spec: RLRunSpec) -> tuple[Json, ...]:
        """Return the pods of each role without which the run cannot work."""
        return required_pods(snapshot, spec)

    async def next_step(self, queued_run: QueuedRun, run: Manifest, held: Manifest | None) -> Step:
        """Read the reasons of the wait of a waiting run; return the answer and the next write.

        The Queue and the events only explain a wait, so they are not read for other runs or for a group whose pods Volcano already allows.
        """
        waits = not (queued_run.has_pods or queued_run.over or queued_run.suspended)
        if not waits or (held is not None and volcano.phase_of(held) in volcano.BEGUN):
            return volcano.next_step(queued_run, held)
        last_message = await self._read_last_message(held) if held is not None else ""
        return volcano.next_step(
            queued_run, held, queue=await self._read_queue_state(queued_run.queue), event_text=last_message
        )

    def keep_admission(self, queued_run: QueuedRun, absent: str) -> Admission:
        """Return an admission, because the additions to the pods follow from the run only."""
        kept = Admission(True, reasons.ROOM_FOUND, f"the run keeps its resources: {absent}")
        return replace(kept, placed=volcano.pod_additions(queued_run))

    def drop_runs(self, uids: set[str]) -> None:
        """Remove expired messages: they are cached by PodGroup, and expire before a run is missed."""
        now = self._cluster.clock()
        self._messages = {uid: kept for uid, kept in self._messages.items() if now < kept[1]}

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
        known = self._messages.get(metadata["uid"])
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
        cache_seconds = READ_SECONDS if last[1] else LOOK_SECONDS
        self._messages[metadata["uid"]] = last[1], self._cluster.clock() + cache_seconds
        return last[1]


def required_pods(snapshot: RunSnapshot, spec: RLRunSpec) -> tuple[Json, ...]:
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
