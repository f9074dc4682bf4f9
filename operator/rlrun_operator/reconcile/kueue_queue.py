"""Kueue as an external queue: its names, the needs of a run in its form, and the reads of flavors and priority classes.

Flavors and priority classes are cluster-scoped: they come from the chart's values, or from the cluster if permitted. The next write of a
Workload comes from `providers.kueue.next_step`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from rlrun.api.resource import RLRunSpec
from rlrun_operator.decide.snapshot import RunSnapshot
from rlrun_operator.kube.client import ApiError, Client, UnavailableError
from rlrun_operator.kube.resources import FLAVOR, PRIORITY_CLASS, WORKLOAD, WORKLOAD_PRIORITY_CLASS, Resource
from rlrun_operator.names import SPOT_SET
from rlrun_operator.providers.kueue import flavors_of, next_step
from rlrun_operator.providers.kueue_workload import PRIORITY_LABEL, QUEUE_LABEL, pod_sets
from rlrun_operator.providers.queue_answers import Flavor, Priority, QueuedRun, Step, refused_answer
from rlrun_operator.reconcile.external_queue import QueueAdapter
from rlrun_operator.reconcile.queue_objects import Cluster
from rlrun_operator.render import render_workloads, spot_deployment
from rlrun_operator.settings import QueueSettings
from rlrun_operator.state import Admission, Json, Manifest
from rlrun_operator.status import reasons

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
            return await self._class_priority(WORKLOAD_PRIORITY_CLASS, str(named))
        if isinstance(own := spec.get("priority"), int) and own:
            return Priority(own)
        trainer = spec.get("trainer")
        name = trainer.get("priorityClassName") if isinstance(trainer, dict) else None
        return await self._class_priority(PRIORITY_CLASS, str(name)) if name else Priority()

    async def _class_priority(self, kind: Resource, name: str) -> Priority:
        value = self._settings.priority_classes.get(name)
        if value is None:
            value = int((await self._read_object(kind, name, "queue.priorityClasses")).get("value") or 0)
        return Priority(value, kind.group, kind.kind, name)

    async def read_flavor(self, name: str) -> Flavor:
        """Return the fields of a ResourceFlavor, from the chart's values or the cluster.

        Raises:
            UnknownError: the flavor cannot be read.
        """
        given = self._settings.flavors.get(name)
        if given is not None:
            return Flavor(given.node_labels, given.tolerations)
        spec = (await self._read_object(FLAVOR, name, "queue.flavors")).get("spec") or {}
        return Flavor(spec.get("nodeLabels") or {}, tuple(spec.get("tolerations") or ()))

    async def _read_object(self, kind: Resource, name: str, value: str) -> Manifest:
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


class KueueAdapter(QueueAdapter):
    """Kueue: a run has a Workload in a LocalQueue.

    Args:
        cluster: clients and caches.
        settings: settings of the queue.
    """

    resource = WORKLOAD

    def __init__(self, cluster: Cluster, settings: QueueSettings) -> None:
        self._settings = settings
        self._now = cluster.now
        self._classes = Classes(cluster.client, settings, cluster.clock)
        self._placed: dict[str, Admission] = {}
        """Last admission of each admitted run, by UID."""

    def explain_absence(self, error: ApiError) -> str:
        """Return why Workloads cannot be listed."""
        if error.status == 404:
            return (
                f"Kueue is not installed: the cluster does not serve {WORKLOAD.plural}.{WORKLOAD.api_version}; install it, or set "
                "queue.provider of the operator's chart to another one"
            )
        return f"Kueue's Workloads may not be read: {error.message}; a helm upgrade of the operator's chart grants it"

    def queue_name(self, run: Manifest, held: Manifest | None) -> str:
        """Return the LocalQueue of a run: a run whose queue name was removed stays in the queue of its Workload."""
        before = ((held or {}).get("spec") or {}).get("queueName")
        return queue_of(run) or self._settings.name or str(before or "")

    def render_needs(self, snapshot: RunSnapshot, spec: RLRunSpec) -> tuple[Json, ...]:
        """Return the pod sets of the next attempt without additions of an admission."""
        return sets_of(snapshot, spec)

    async def next_step(self, queued_run: QueuedRun, run: Manifest, held: Manifest | None) -> Step:
        """Read the priority class and the admitted flavors, and return the next write and the answer.

        Raises:
            UnavailableError: a class or a flavor of a run with resources cannot be read now.
        """
        try:
            queued_run = replace(queued_run, priority=await self._classes.priority(run))
            names = flavors_of(held) if held is not None else frozenset()
            flavors = {name: await self._classes.read_flavor(name) for name in sorted(names)}
        except UnknownError as error:
            if queued_run.holds:
                return Step(self.keep_admission(queued_run, str(error)))
            return Step(refused_answer(reasons.QUEUE_MISCONFIGURED, str(error)))
        made = next_step(queued_run, held, flavors=flavors, now=self._now())
        if made.answer.admitted:
            self._placed[queued_run.uid] = made.answer
        return made

    def keep_admission(self, queued_run: QueuedRun, absent: str) -> Admission:
        """Return the last admission, which has the additions to the pods: without them the pods would be replaced.

        Raises:
            UnavailableError: this process has not seen the admission.
        """
        if (kept := self._placed.get(queued_run.uid)) is None:
            raise UnavailableError(absent)
        return kept

    def drop_runs(self, uids: set[str]) -> None:
        """Remove all admissions except those of these runs."""
        self._placed = {uid: kept for uid, kept in self._placed.items() if uid in uids}


def queue_of(run: Manifest) -> str:
    """Return the LocalQueue of a run; empty if it has none."""
    own = (run.get("spec") or {}).get("queueName")
    label = (run["metadata"].get("labels") or {}).get(QUEUE_LABEL)
    return own if isinstance(own, str) and own else str(label or "")


def sets_of(snapshot: RunSnapshot, spec: RLRunSpec) -> tuple[Json, ...]:
    """Return the pod sets of a run's next attempt, without additions of an admission and without temporarily excluded nodes.

    Autoscaled engines and elastic trainers count with their maximum, because Kueue stops a run that exceeds its admission.
    """
    context = replace(snapshot.context(spec, 1), spec=spec, placed={}, excluded=())
    spot, engines = spot_deployment(context), spec.inference
    most_spot = engines.on_spot(engines.max_replicas)
    most = {"inference": engines.max_replicas - most_spot, SPOT_SET: most_spot}
    sets = pod_sets((*render_workloads(context).existing, *((spot,) if spot is not None and most_spot else ())))
    return tuple({**one, "count": most.get(one["name"], one["count"])} for one in sets)
