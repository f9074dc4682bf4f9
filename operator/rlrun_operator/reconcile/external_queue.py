"""External queues: what they have in common, and the interface of those that the operator knows.

`ExternalQueue` answers for a run from the run's object in the queue. A `QueueAdapter` contains the differences of Kueue and Volcano:
a third queue needs another adapter, the rules that it calls in `providers`, and a line in `queues` and in `providers`.
"""

from __future__ import annotations

from typing import Literal, Protocol

from rlrun.api.resource import RLRunSpec
from rlrun_operator.decide import queueing
from rlrun_operator.decide.reading import has_let_go
from rlrun_operator.decide.snapshot import RunSnapshot
from rlrun_operator.kube.client import ApiError
from rlrun_operator.kube.resources import Resource
from rlrun_operator.providers.queue_answers import QueuedRun, Step, name_of, refused_answer
from rlrun_operator.reconcile.observe import observe_run
from rlrun_operator.reconcile.queue_objects import LOOK_SECONDS, Cluster, QueueObjects
from rlrun_operator.settings import RenderSettings
from rlrun_operator.sharing import host_name
from rlrun_operator.state import Admission, Json, Manifest
from rlrun_operator.status import reasons
from rlrun_operator.status.conditions import find_condition, is_true

_OUTCOMES: dict[str, Literal["Succeeded", "Failed"]] = {"Complete": "Succeeded", "Failed": "Failed"}


class QueueAdapter(Protocol):
    """One external queue: the kind of its object for a run, the names and needs that it reads, and its decisions."""

    resource: Resource
    """Kind of the object that a run has in this queue."""

    def explain_absence(self, error: ApiError) -> str:
        """Return the message for a refused list of the objects: the queue is not installed, or a permission is missing."""

    def queue_name(self, run: Manifest, held: Manifest | None) -> str:
        """Return the name of a run's queue; empty if the run uses none. `held`: the run's object, or None."""

    def render_needs(self, snapshot: RunSnapshot, spec: RLRunSpec) -> tuple[Json, ...]:
        """Return the needs of a run's next attempt, by role, in the form of this queue."""

    async def next_step(self, subject: QueuedRun, run: Manifest, held: Manifest | None) -> Step:
        """Return the next write of the run's object, and the answer.

        Args:
            subject: view of the run.
            run: manifest with the team's defaults.
            held: run's object, or None.

        Raises:
            UnavailableError: a part of the decision cannot be read now.
        """

    def keep_admission(self, subject: QueuedRun, absent: str) -> Admission:
        """Return the answer for a run that holds resources while the objects cannot be listed because of `absent`.

        Raises:
            UnavailableError: the admission is unknown, so that nothing may be decided now.
        """

    def drop_runs(self, uids: set[str]) -> None:
        """Remove all runs from the caches except these."""


class ExternalQueue:
    """Answers of an external queue; each run has one object in it."""

    def __init__(self, cluster: Cluster, render: RenderSettings, adapter: QueueAdapter) -> None:
        self._cluster = cluster
        self._render = render
        self.adapter = adapter
        self._objects = QueueObjects(
            cluster, adapter.resource, why_absent=adapter.explain_absence, on_list=self._drop_deleted_runs
        )
        self._needs: dict[str, tuple[object, tuple[Json, ...]]] = {}
        """Inputs and result of `render_needs`, by the run's UID."""

    async def run(self) -> None:
        """List the objects periodically, and queue the runs with changed objects."""
        await self._objects.run()

    async def answer(self, run: Manifest) -> Admission | None:
        """Return the answer for one run, or None if the run does not use this queue.

        Raises:
            UnavailableError: the run's object, or a part of its decision, cannot be read now.
        """
        metadata = run["metadata"]
        key = (str(metadata["namespace"]), str(metadata["name"]))
        await self._objects.ensure_listed(key[0])
        # `run` may be older than the list that was awaited, so the run is observed again. It may also be deleted meanwhile. A guest runs in
        # the pods of its host, the run whose trainer it shares, so it has no object of its own.
        found = observe_run(self._cluster.store, key)
        if found is None or host_name(run) is not None:
            return None
        held = self._objects.get(key[0], name_of(key[1], str(metadata["uid"])))
        queue = self.adapter.queue_name(run, held)
        # No key and no random number are needed: this snapshot starts no attempt.
        snapshot = RunSnapshot(found, self._cluster.now(), self._render, "", 0.0)
        # A run that started without a queue, such as before the queue was set up, uses no queue until it is suspended or ends.
        if not queue or (held is None and started_without_queue(snapshot)):
            return None
        subject = make_queued_run(snapshot, queue, self._needs_of(snapshot))
        # Without the queue's objects no run may start, but a run with pods or a recorded admission (`holds`) keeps its resources.
        if absent := self._objects.absence_reason(key[0]):
            if subject.holds:
                return self.adapter.keep_admission(subject, absent)
            return refused_answer(reasons.QUEUE_UNAVAILABLE, absent)
        # No event reports the end of a suspended run's pods, after which its object releases the resources, so it is observed again.
        if subject.suspended and subject.holds:
            self._cluster.requeue(key, LOOK_SECONDS)
        return await self._objects.write_until_current(
            subject, lambda current: self.adapter.next_step(subject, snapshot.applied.run, current)
        )

    def _needs_of(self, snapshot: RunSnapshot) -> tuple[Json, ...]:
        """Return the needs of the next attempt, or none for an invalid specification.

        The result is cached until one of its inputs changes, because rendering takes as long as all other work of a pass over the run.
        """
        uid, spec = str(snapshot.metadata["uid"]), snapshot.spec
        if spec is None:
            return ()
        mark = (snapshot.generation, snapshot.spec_hash, snapshot.wanted.trainers, snapshot.wanted.engines_needed)
        known = self._needs.get(uid)
        if known is None or known[0] != mark:
            known = self._needs[uid] = (mark, self.adapter.render_needs(snapshot, spec))
        return known[1]

    def _drop_deleted_runs(self, uids: set[str]) -> None:
        """Remove deleted runs from the caches."""
        self._needs = {uid: kept for uid, kept in self._needs.items() if uid in uids}
        self.adapter.drop_runs(uids)


def started_without_queue(snapshot: RunSnapshot) -> bool:
    """Return whether a run has started without admission by a queue: it keeps its pods until it is suspended or ends."""
    past = snapshot.past
    if find_condition(past.conditions, reasons.ADMITTED) is not None or is_true(past.conditions, reasons.SUSPENDED):
        return False
    return snapshot.attempt > 0


def make_queued_run(snapshot: RunSnapshot, queue: str, sets: tuple[Json, ...]) -> QueuedRun:
    """Return the view of a run that its external queue needs.

    Args:
        snapshot: snapshot of the run.
        queue: name of its queue.
        sets: needs of its next attempt, by role (`QueueAdapter.render_needs`).
    """
    past, uid = snapshot.past, str(snapshot.metadata["uid"])
    ended = _OUTCOMES.get(str(past.phase))
    live = [pod for pod in snapshot.pods if pod.phase not in ("Succeeded", "Failed")]
    makes = bool(snapshot.engine_deployments) or not has_let_go(snapshot.statefulset)
    recorded = is_true(past.conditions, reasons.ADMITTED)
    engines = find_condition(past.conditions, reasons.INFERENCE_AVAILABLE)
    suspended = find_condition(past.conditions, reasons.SUSPENDED)
    stops = suspended is not None and suspended.reason == reasons.SUSPENDING  # a new pod may be missing in the cache
    at_rest = is_true(past.conditions, reasons.SUSPENDED) or is_true(past.conditions, reasons.RESTARTING)
    return QueuedRun(
        name=snapshot.names.run,
        namespace=str(snapshot.metadata["namespace"]),
        uid=uid,
        queue=queue,
        pod_sets=sets,
        holds=bool(live) or makes or (ended is None and (recorded or stops)),
        has_pods=bool(live) or makes,
        begins=snapshot.attempt == 0 or at_rest,
        engines=snapshot.wanted.engines - snapshot.wanted.spot,
        spot=snapshot.wanted.spot,
        suspended=queueing.shall_rest(snapshot),
        ready=is_true(past.conditions, reasons.PODS_READY) and (engines is None or engines.status == "True"),
        over=ended,
        outcome=past.message or "",
    )
