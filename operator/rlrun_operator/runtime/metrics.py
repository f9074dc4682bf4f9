"""Prometheus metrics of the operator and of its runs.

Series of runs are made from the store when they are scraped, so that those of a deleted run vanish with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from rlrun.api.status import UNSERVED, Phase
from rlrun_operator.decide.snapshot import read_status
from rlrun_operator.kube.resources import POD
from rlrun_operator.names import ROLE_LABEL, ROLES
from rlrun_operator.runtime.cache import Key, Store
from rlrun_operator.state import Manifest
from rlrun_operator.status import reasons
from rlrun_operator.status.conditions import raw_conditions
from rlrun_operator.times import seconds_of

PHASES = tuple(phase for phase in get_args(Phase) if phase != UNSERVED["phase"])
"""Phases of runs that an operator serves."""
_RUN = ["namespace", "run"]
_GPU_SUFFIX = "/gpu"


@dataclass
class Restarts:
    """Restarts that this process saw, by run, reason and whether they counted; and since when each run is in its phase."""

    total: dict[Key, dict[tuple[str, str], int]] = field(default_factory=dict)
    phase_since: dict[Key, tuple[str, float]] = field(default_factory=dict)


class Metrics:
    """All metrics of one operator process, in a registry of its own."""

    def __init__(self, store: Store) -> None:
        self.registry = CollectorRegistry()
        self._seen = Restarts()
        self.api_requests = Counter(
            "rlrun_operator_api_requests",
            "Requests to the API server; verb dry-run changes nothing",
            ["verb", "resource", "code"],
            registry=self.registry,
        )
        self.reconcile_seconds = Histogram(
            "rlrun_operator_reconcile_seconds",
            "Time from taking a run from the queue to having acted",
            ["outcome"],
            registry=self.registry,
            buckets=(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30),
        )
        self.phase_seconds = Histogram(
            "rlrun_phase_duration_seconds",
            "Time that runs spent in a phase, when they left it",
            ["phase"],
            registry=self.registry,
            buckets=(1, 3, 10, 30, 60, 180, 600, 1800, 3600, 4 * 3600, 24 * 3600),
        )
        self._queue_depth = Gauge("rlrun_operator_queue_depth", "Runs that wait for a worker", registry=self.registry)
        self._queue_age = Gauge(
            "rlrun_operator_queue_age_seconds", "How long the oldest of them waits", registry=self.registry
        )
        self._watch_age = Gauge(
            "rlrun_operator_watch_age_seconds",
            "Time since a watch brought anything, bookmarks included; about 60 when nothing happens",
            ["resource", "namespace"],
            registry=self.registry,
        )
        self._leader = Gauge("rlrun_operator_leader", "1 while this process acts", registry=self.registry)
        self._places = Gauge(
            "rlrun_operator_serves",
            "1 where this operator looks after the runs of a namespace (that name it as managed_by), 0 where another one does",
            ["namespace", "managed_by"],
            registry=self.registry,
        )
        self._objects = Gauge("rlrun_operator_objects", "Objects in memory", ["kind"], registry=self.registry)
        self._stops = Counter(
            "rlrun_queue_stops",
            "Runs that the queue has suspended: Preempted or Released",
            ["reason"],
            registry=self.registry,
        )
        self.registry.register(_Runs(store, self._seen))
        ProcessCollector(registry=self.registry)

    def count_request(self, verb: str, resource: str, code: str) -> None:
        """Count one request to the API server, answered or not (`code` then has the reason)."""
        self.api_requests.labels(verb, resource, code).inc()

    def observe_queue(self, depth: Callable[[], float], age: Callable[[], float], leader: Callable[[], float]) -> None:
        """Read these at each scrape."""
        self._queue_depth.set_function(depth)
        self._queue_age.set_function(age)
        self._leader.set_function(leader)

    def observe_watch(self, resource: str, namespace: str | None, age: Callable[[], float]) -> None:
        """Read the age of a watch at each scrape."""
        self._watch_age.labels(resource, namespace or "").set_function(age)

    def observe_places(self, held: Iterable[tuple[str, str | None]], others: Iterable[tuple[str, str | None]]) -> None:
        """Set where this operator acts, and where another one does."""
        self._places.clear()
        for places, value in ((others, 0), (held, 1)):
            for namespace, named in places:
                self._places.labels(namespace, named or "").set(value)

    def observe_objects(self, counts: Mapping[str, int]) -> None:
        """Set the numbers of objects in memory."""
        for kind, count in counts.items():
            self._objects.labels(kind).set(count)

    def status_written(self, key: Key, old: Mapping[str, object], new: Mapping[str, object], now: float) -> None:
        """A run's status changed from `old` to `new`.

        Args:
            now: seconds of any steady clock.
        """
        was, phase = old.get("phase"), str(new.get("phase", ""))
        since = self._seen.phase_since.get(key)
        if phase and phase != was:
            if was and since is not None and since[0] == was:
                self.phase_seconds.labels(was).observe(now - since[1])
            self._seen.phase_since[key] = (phase, now)
        if (reason := _gives_back(new)) is not None and reason != _gives_back(old):
            self._stops.labels(reason).inc()
        restarts = _count(new, "restarts") - _count(old, "restarts")
        if restarts > 0:
            counted = _count(new, "restartsCountedTowardsMax") > _count(old, "restartsCountedTowardsMax")
            failure = new.get("lastFailure")
            reason = str(failure.get("reason", "Unknown")) if isinstance(failure, Mapping) else "Unknown"
            labels = (reason, "true" if counted else "false")
            totals = self._seen.total.setdefault(key, {})
            totals[labels] = totals.get(labels, 0) + restarts

    def forget(self, key: Key) -> None:
        """The run is gone."""
        self._seen.total.pop(key, None)
        self._seen.phase_since.pop(key, None)


class _Runs:
    """Collector of the series that are about single runs."""

    def __init__(self, store: Store, seen: Restarts) -> None:
        self._store = store
        self._seen = seen

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        info = GaugeMetricFamily("rlrun_info", "What the run is; always 1", labels=[*_RUN, "model", "uid"])
        phase = GaugeMetricFamily("rlrun_phase", "1 for the phase that the run is in", labels=[*_RUN, "phase"])
        attempt = GaugeMetricFamily("rlrun_attempt", "Number of the current attempt", labels=_RUN)
        step = GaugeMetricFamily("rlrun_step", "Last trained step", labels=_RUN)
        reward = GaugeMetricFamily("rlrun_reward", "Mean reward of the last step", labels=_RUN)
        last = GaugeMetricFamily(
            "rlrun_last_step_timestamp_seconds", "When the step changed last, seconds since the epoch", labels=_RUN
        )
        lost = CounterMetricFamily("rlrun_steps_lost", "Steps that restarts trained again", labels=_RUN)
        restarts = CounterMetricFamily(
            "rlrun_restarts", "Restarts; counted: towards maxRestarts", labels=[*_RUN, "reason", "counted"]
        )
        gpus = GaugeMetricFamily("rlrun_gpus_allocated", "GPUs of pods that have a node", labels=[*_RUN, "role"])
        engines = [
            GaugeMetricFamily(f"rlrun_engines_{name}", text, labels=_RUN)
            for name, text in (("wanted", "Engines that a run is to have"), ("ready", "Engines that are ready"))
        ]
        place = GaugeMetricFamily("rlrun_queue_position", "Place of a run that waits in the queue, from 1", labels=_RUN)
        queued = GaugeMetricFamily(
            "rlrun_queue_since_timestamp_seconds",
            "When a run that waits in the queue asked first, seconds since the epoch",
            labels=_RUN,
        )
        for run in self._store.runs():
            name, namespace = run["metadata"]["name"], run["metadata"]["namespace"]
            labels, status = [namespace, name], read_status(run.get("status") or {})
            info.add_metric([*labels, _model(run), run["metadata"]["uid"]], 1)
            if status.phase is not None:
                for each in PHASES:
                    phase.add_metric([*labels, each], float(each == status.phase))
            attempt.add_metric(labels, status.attempt)
            step.add_metric(labels, status.progress.step)
            lost.add_metric(labels, status.checkpoint.steps_lost_total)
            for family, count in zip(engines, (status.inference.desired, status.inference.ready), strict=True):
                family.add_metric(labels, count)
            if status.progress.reward is not None:
                reward.add_metric(labels, status.progress.reward)
            if (stepped := seconds_of(status.progress.last_step_time)) is not None:
                last.add_metric(labels, stepped)
            if status.queue is not None and status.queue.position is not None:
                place.add_metric(labels, status.queue.position)
                queued.add_metric(labels, seconds_of(status.queue.since) or 0.0)
            for (reason, counted), count in self._seen.total.get((namespace, name), {}).items():
                restarts.add_metric([*labels, reason, counted], count)
            for role, count in _gpus(self._store.children((namespace, name))).items():
                gpus.add_metric([*labels, role], count)
        yield from (info, phase, attempt, step, reward, last, lost, restarts, gpus, place, queued, *engines)


def _count(status: Mapping[str, object], name: str) -> int:
    """A number of a status that another client may have filled with anything."""
    value = status.get(name, 0)
    return value if isinstance(value, int) else 0


def _gives_back(status: Mapping[str, object]) -> str | None:
    """Reason for which the queue takes a run's room back; None: it does not."""
    found = {c.get("type"): c.get("reason") for c in raw_conditions(dict(status))}.get(reasons.ADMITTED)
    return str(found) if found in reasons.GIVES_BACK else None


def _model(run: Manifest) -> str:
    model = (run.get("spec") or {}).get("model")
    if not isinstance(model, Mapping):
        return ""
    return str(model.get("name") or model.get("path") or ("tiny" if "tiny" in model else ""))


def _gpus(children: Iterable[Manifest]) -> dict[str, int]:
    """GPUs (every extended resource called `…/gpu`) of scheduled pods that have not ended, by role."""
    counts: dict[str, int] = {}
    for pod in children:
        if pod["kind"] != POD.kind or (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed"):
            continue
        spec = pod.get("spec") or {}
        role = (pod["metadata"].get("labels") or {}).get(ROLE_LABEL, "")
        if (
            not spec.get("nodeName") or role not in ROLES
        ):  # a label that any client may write must not become one of a series
            continue
        for container in spec.get("containers", ()):
            for name, value in ((container.get("resources") or {}).get("limits") or {}).items():
                if name.endswith(_GPU_SUFFIX) and str(value).isdecimal():
                    counts[role] = counts.get(role, 0) + int(value)
    return counts
