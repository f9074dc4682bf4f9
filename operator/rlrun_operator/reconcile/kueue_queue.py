"""Kueue as a queue of the operator: reads of Workloads, flavors and priority classes, and the writes.

Flavors and priority classes are cluster-scoped: they come from the chart's values, or from the cluster if permitted. The next write of a
Workload comes from `providers.next_step`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Literal, NamedTuple

from rlrun.api.resource import RLRunSpec
from rlrun_operator.decide import queueing
from rlrun_operator.decide.reading import has_let_go
from rlrun_operator.decide.snapshot import RunSnapshot
from rlrun_operator.kube.client import ApiError, Client, UnavailableError
from rlrun_operator.kube.resources import FLAVOR, PRIORITY_CLASS, WORKLOAD, WORKLOAD_PRIORITY_CLASS, Resource
from rlrun_operator.names import SPOT_SET
from rlrun_operator.providers import Flavor, Priority, Step, Subject, next_step
from rlrun_operator.providers.kueue import flavors_of
from rlrun_operator.providers.kueue_workload import PRIORITY_LABEL, QUEUE_LABEL, name_of, pod_sets, refused_answer
from rlrun_operator.reconcile.observe import observe_run
from rlrun_operator.reconcile.queue_objects import LOOK_SECONDS, Cluster, QueueObjects
from rlrun_operator.render import render_workloads, spot_deployment
from rlrun_operator.settings import QueueSettings, RenderSettings
from rlrun_operator.sharing import host_name
from rlrun_operator.state import Admission, Json, Manifest
from rlrun_operator.status import reasons
from rlrun_operator.status.conditions import find_condition, is_true

CLASS_SECONDS = 60.0
"""Time for which a flavor or a priority class is cached."""


class UnknownError(Exception):
    """Error for an unreadable class or flavor; the message contains its name, the reason and a fix."""


class _Known(NamedTuple):
    found: Manifest
    until: float


class Classes:
    """Flavors and priority classes.

    Args:
        client: client of the API server.
        settings: settings of the queue.
        clock: returns steady seconds.
    """

    def __init__(self, client: Client, settings: QueueSettings, clock: Callable[[], float]) -> None:
        self._client = client
        self._settings = settings
        self._clock = clock
        self._read: dict[tuple[str, str], _Known] = {}

    async def priority(self, run: Manifest) -> Priority:
        """Return the priority of a run: from the class in its label, or its own number, or from its trainer's class.

        Raises:
            UnknownError: the class cannot be read.
        """
        spec = run.get("spec") or {}
        named = (run["metadata"].get("labels") or {}).get(PRIORITY_LABEL)
        if named:
            return await self._class(WORKLOAD_PRIORITY_CLASS, str(named))
        if isinstance(own := spec.get("priority"), int) and own:
            return Priority(own)
        trainer = spec.get("trainer")
        name = trainer.get("priorityClassName") if isinstance(trainer, dict) else None
        return await self._class(PRIORITY_CLASS, str(name)) if name else Priority()

    async def _class(self, kind: Resource, name: str) -> Priority:
        value = self._settings.priority_classes.get(name)
        if value is None:
            value = int((await self._get(kind, name, "queue.priorityClasses")).get("value") or 0)
        return Priority(value, kind.group, kind.kind, name)

    async def flavor(self, name: str) -> Flavor:
        """Return the fields of a ResourceFlavor, from the chart's values or the cluster.

        Raises:
            UnknownError: the flavor cannot be read.
        """
        given = self._settings.flavors.get(name)
        if given is not None:
            return Flavor(given.node_labels, given.tolerations)
        spec = (await self._get(FLAVOR, name, "queue.flavors")).get("spec") or {}
        return Flavor(spec.get("nodeLabels") or {}, tuple(spec.get("tolerations") or ()))

    async def _get(self, kind: Resource, name: str, value: str) -> Manifest:
        """Return a cluster-scoped object.

        Raises:
            UnknownError: the object does not exist, or may not be read.
        """
        known = self._read.get((kind.kind, name))
        if known is not None and self._clock() < known.until:
            return known.found
        try:
            found = await self._client.get(kind, None, name)
        except ApiError as error:
            if not error.lacks_permission:
                raise
            fix = f"put it into {value} of the operator's chart"
            raise UnknownError(f"{kind.kind} {name} may not be read by this operator; {fix}") from error
        if found is None:
            raise UnknownError(f"{kind.kind} {name} does not exist; have it made, or name another one")
        self._read[kind.kind, name] = _Known(found, self._clock() + CLASS_SECONDS)
        return found


_OUTCOMES: dict[str, Literal["Succeeded", "Failed"]] = {"Complete": "Succeeded", "Failed": "Failed"}


class KueueQueue:
    """Answers of Kueue for runs with a LocalQueue."""

    def __init__(self, cluster: Cluster, settings: QueueSettings, render: RenderSettings) -> None:
        self._cluster = cluster
        self._settings = settings
        self._render = render
        self._objects = QueueObjects(cluster, WORKLOAD, why_absent=_why_absent, on_look=self._drop_deleted_runs)
        self._classes = Classes(cluster.client, settings, cluster.clock)
        self._placed: dict[str, Admission] = {}
        """Last admission of each admitted run, by UID."""
        self._sets: dict[str, tuple[object, tuple[Json, ...]]] = {}

    async def run(self) -> None:
        """List Workloads periodically, and queue the runs with changed Workloads."""
        await self._objects.run()

    async def answer(self, run: Manifest) -> Admission | None:
        """Return the answer for one run, or None if the run does not use a queue of Kueue.

        Raises:
            UnavailableError: the Workload, its flavors or its priority class cannot be read now.
        """
        metadata = run["metadata"]
        key = (str(metadata["namespace"]), str(metadata["name"]))
        await self._objects.ensure_listed(key[0])
        queue = queue_of(run) or self._settings.name or self._queue_before(run)
        found = observe_run(self._cluster.store, key)
        if found is None or host_name(run) is not None or not queue:
            return None
        snapshot = RunSnapshot(found, self._cluster.now(), self._render, "", 0.0)
        if began_before(snapshot) and not self._queue_before(run):
            return None
        subject = subject_of(snapshot, queue, self._pod_sets(snapshot))
        if absent := self._objects.absence_reason(key[0]):
            return self._without_kueue(subject, absent)
        try:
            subject = replace(subject, priority=await self._classes.priority(snapshot.applied.run))
            if subject.suspended and subject.holds:
                self._cluster.again(
                    key, LOOK_SECONDS
                )  # no event reports the end of its pods, and its quota must be released
            return await self._objects.write_until_current(subject, self._next_step)
        except UnknownError as error:
            if (kept := self._placed.get(subject.uid)) is not None and subject.holds:
                return kept
            if subject.holds:
                raise UnavailableError(str(error)) from error
            return refused_answer(reasons.QUEUE_MISCONFIGURED, str(error))

    def _queue_before(self, run: Manifest) -> str:
        """Return the LocalQueue of the run's Workload: a run whose queue name was removed stays in its queue."""
        metadata = run["metadata"]
        name = name_of(str(metadata["name"]), str(metadata["uid"]))
        workload = self._objects.get(str(metadata["namespace"]), name)
        return str(((workload or {}).get("spec") or {}).get("queueName") or "")

    def _without_kueue(self, run: Subject, absent: str) -> Admission:
        """Return the answer while Kueue's API is missing, possibly for a moment: an admitted run keeps its admission."""
        if not run.holds:
            return refused_answer(reasons.QUEUE_UNAVAILABLE, absent)
        if (kept := self._placed.get(run.uid)) is None:
            raise UnavailableError(absent)
        return kept

    async def _next_step(self, run: Subject) -> Step:
        workload = self._workload(run)
        names = flavors_of(workload) if workload is not None else frozenset()
        flavors = {name: await self._classes.flavor(name) for name in sorted(names)}
        made = next_step(run, workload, flavors=flavors, now=self._cluster.now())
        if made.answer.admitted:
            self._placed[run.uid] = made.answer
        return made

    def _workload(self, run: Subject) -> Manifest | None:
        return self._objects.get(run.namespace, name_of(run.name, run.uid))

    def _drop_deleted_runs(self, uids: set[str]) -> None:
        """Remove deleted runs from the caches."""
        self._placed = {uid: kept for uid, kept in self._placed.items() if uid in uids}
        self._sets = {uid: kept for uid, kept in self._sets.items() if uid in uids}

    def _pod_sets(self, snapshot: RunSnapshot) -> tuple[Json, ...]:
        """Return the pod sets of the next attempt without additions of an admission. They are cached until an edit, because rendering takes
        as long as a pass."""
        uid, spec = str(snapshot.metadata["uid"]), snapshot.spec
        if spec is None:
            return ()
        known = self._sets.get(uid)
        mark = (snapshot.generation, snapshot.spec_hash)
        if known is None or known[0] != mark:
            known = self._sets[uid] = (mark, sets_of(snapshot, spec))
        return known[1]


def queue_of(run: Manifest) -> str:
    """Return the LocalQueue of a run; empty if it has none."""
    own = (run.get("spec") or {}).get("queueName")
    label = (run["metadata"].get("labels") or {}).get(QUEUE_LABEL)
    return own if isinstance(own, str) and own else str(label or "")


def began_before(snapshot: RunSnapshot) -> bool:
    """Return whether a run has started without admission by a queue: it keeps its pods until it is suspended or ends."""
    past = snapshot.past
    if find_condition(past.conditions, reasons.ADMITTED) is not None or is_true(past.conditions, reasons.SUSPENDED):
        return False
    return snapshot.attempt > 0


def _why_absent(error: ApiError) -> str:
    if error.status == 404:
        return (
            f"Kueue is not installed: the cluster does not serve {WORKLOAD.plural}.{WORKLOAD.api_version}; install it, or set "
            "queue.provider of the operator's chart to another one"
        )
    return f"Kueue's Workloads may not be read: {error.message}; a helm upgrade of the operator's chart grants it"


def subject_of(snapshot: RunSnapshot, queue: str, sets: tuple[Json, ...]) -> Subject:
    """Return the view of a run that Kueue or Volcano needs.

    Args:
        snapshot: snapshot of the run.
        queue: name of its LocalQueue (Kueue) or Queue (Volcano).
        sets: pod sets of its next attempt.
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
    return Subject(
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


def sets_of(snapshot: RunSnapshot, spec: RLRunSpec) -> tuple[Json, ...]:
    """Return the pod sets of a run's next attempt, without additions of an admission and without temporarily excluded nodes.

    Autoscaled engines and elastic trainers count with their maximum, because Kueue stops a run that exceeds its admission.
    """
    context = replace(snapshot.context(spec, 1), spec=spec, placed={}, excluded=())
    spot, engines = spot_deployment(context), spec.inference
    most_spot = engines.on_spot(engines.most)
    most = {"inference": engines.most - most_spot, SPOT_SET: most_spot}
    sets = pod_sets((*render_workloads(context).existing, *((spot,) if spot is not None and most_spot else ())))
    return tuple({**one, "count": most.get(one["name"], one["count"])} for one in sets)
