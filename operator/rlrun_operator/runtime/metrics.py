"""Prometheus metrics of the operator's own work and of its runs: names, labels, meanings and values.

Series of runs are created from the operator's cache at each scrape, so that a deleted run has no series.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.core import Metric

from rlrun.api.run_status import COUNT_MAX, UNSERVED, Phase, RLRunStatus
from rlrun.protocol.messages.lease_annotations import RESTART_PHASES
from rlrun.runtime.metric_table import Kind, MetricSpec, MetricTable
from rlrun_operator.decide.gpu_time_split import Use
from rlrun_operator.decide.reading import read_status
from rlrun_operator.kube.resources import POD
from rlrun_operator.names import ROLE_LABEL, ROLES
from rlrun_operator.pods import gpus_of, resource_of
from rlrun_operator.runtime.cache import Key, Store
from rlrun_operator.state import Manifest
from rlrun_operator.status import failure_reasons, reasons
from rlrun_operator.status.conditions import raw_conditions
from rlrun_operator.times import seconds_of

RUN = ("namespace", "run")
"""Labels of a series about one run. Only the leading process has such series, and they end with the run."""


def _of_run(
    name: str, text: str, *labels: str, counter: bool = False, timestamp: bool = False, seconds: bool = False
) -> MetricSpec:
    kind: Kind = "counter" if counter else "gauge"
    return MetricSpec(name, kind, text, (*RUN, *labels), "timestamp" if timestamp else "seconds" if seconds else "")


RUNS = MetricTable(
    _of_run("rlrun_info", "Facts about the run; always 1", "model", "uid"),
    _of_run("rlrun_created_timestamp_seconds", "Time of the run's creation, since the epoch", timestamp=True),
    _of_run("rlrun_phase", "1 for the phase that the run is in, 0 for each other one", "phase"),
    _of_run(
        "rlrun_condition",
        "1 for each condition of the run's status, with its current values",
        "type",
        "status",
        "reason",
    ),
    _of_run("rlrun_attempt", "Number of the current attempt"),
    _of_run("rlrun_step", "Last trained step"),
    _of_run("rlrun_max_steps", "Steps of the run"),
    _of_run("rlrun_reward_mean", "Mean reward of the last trained step"),
    _of_run(
        "rlrun_last_step_timestamp_seconds", "Time of the last change of the step, since the epoch", timestamp=True
    ),
    _of_run("rlrun_steps_lost_total", "Steps that restarts had to train again", counter=True),
    _of_run("rlrun_restarts_total", "Restarts; counted: towards failurePolicy.maxRestarts", "counted", counter=True),
    _of_run("rlrun_failures_total", "Ends of attempts that this process saw, by the cause", "reason", counter=True),
    _of_run("rlrun_gpus_allocated", "GPUs of pods that have a node and have not ended", "role"),
    _of_run(
        "rlrun_gpu_seconds_total",
        "GPU time of the run's pods, from scheduling to end, by use; all attempts together",
        "role",
        "use",
        counter=True,
    ),
    _of_run("rlrun_tokens_per_gpu_hour", "Tokens trained per GPU-hour, since the run started"),
    _of_run("rlrun_samples_per_gpu_hour", "Samples trained per GPU-hour, since the run started"),
    _of_run("rlrun_budget_gpu_seconds", "GPU time that `spec.budget` allows", seconds=True),
    _of_run("rlrun_engines_wanted", "Wanted engines of a run"),
    _of_run("rlrun_engines_ready", "Engines that are ready"),
    _of_run("rlrun_spot_engines_wanted", "Wanted engines on interruptible nodes"),
    _of_run("rlrun_spot_engines_ready", "Engines on interruptible nodes that are ready"),
    _of_run("rlrun_spot_engines_lost_total", "Engines that were lost with interruptible nodes", counter=True),
    _of_run("rlrun_trainer_size_wanted", "Wanted pods of the trainer"),
    _of_run(
        "rlrun_trainer_size",
        "Pods of the attempt's trainer: fewer than wanted with `trainer.elastic` while nodes are missing",
    ),
    _of_run("rlrun_queue_position", "Position of a waiting run in the queue, from 1"),
    _of_run(
        "rlrun_queue_since_timestamp_seconds",
        "Time since which a run waits in the queue, since the epoch",
        timestamp=True,
    ),
)
"""Metrics of runs, created at each scrape from the operator's cache."""

OPERATOR = MetricTable(
    MetricSpec(
        "rlrun_operator_api_requests_total",
        "counter",
        "Requests to the API server; verb dry-run changes nothing",
        ("verb", "resource", "code"),
    ),
    MetricSpec(
        "rlrun_operator_reconcile_seconds",
        "histogram",
        "Time from taking a run from the work queue to the end of its actions",
        ("outcome",),
        "seconds",
    ),
    MetricSpec(
        "rlrun_phase_duration_seconds",
        "histogram",
        "Time that runs spent in a phase, observed at its end",
        ("phase",),
        "seconds",
    ),
    MetricSpec(
        "rlrun_restart_seconds",
        "histogram",
        "Time of each phase of a restart, once its attempt has trained a new step; phase total: the sum",
        ("phase",),
        "seconds",
    ),
    MetricSpec("rlrun_operator_queue_depth", "gauge", "Runs that wait for a worker"),
    MetricSpec("rlrun_operator_queue_age_seconds", "gauge", "Wait of the oldest of them", unit="seconds"),
    MetricSpec(
        "rlrun_operator_watch_age_seconds",
        "gauge",
        "Time since the last data of a watch, including bookmarks; about 60 if nothing happens",
        ("resource", "namespace"),
        "seconds",
    ),
    MetricSpec("rlrun_operator_leader", "gauge", "1 while this process acts, 0 while it stands by"),
    MetricSpec(
        "rlrun_operator_serves",
        "gauge",
        "1 if this operator serves the runs of a namespace (that name it as managed_by), 0 if another operator does",
        ("namespace", "managed_by"),
    ),
    MetricSpec("rlrun_operator_objects", "gauge", "Objects in memory", ("kind",)),
    MetricSpec("rlrun_queue_stops_total", "counter", "Runs that the queue has suspended, by the cause", ("reason",)),
)
"""Metrics that the process updates while it works."""


PHASES = tuple(phase for phase in get_args(Phase) if phase != UNSERVED["phase"])
"""Phases of served runs."""
UNKNOWN = "Unknown"
"""Value of the label reason for a reason that no table contains."""


@dataclass
class Failures:
    """Ends of attempts that this process observed, by run and reason; and the start of each run's current phase."""

    total: dict[Key, dict[str, int]] = field(default_factory=dict)
    phase_since: dict[Key, tuple[str, float]] = field(default_factory=dict)


class Metrics:
    """All metrics of one operator process, in their own registry."""

    def __init__(self, store: Store) -> None:
        self.registry = CollectorRegistry()
        self._seen = Failures()
        self.api_requests = self._make_counter("rlrun_operator_api_requests_total")
        self.reconcile_seconds = Histogram(
            *OPERATOR.metric_arguments("rlrun_operator_reconcile_seconds"),
            registry=self.registry,
            buckets=(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30),
        )
        self.phase_seconds = Histogram(
            *OPERATOR.metric_arguments("rlrun_phase_duration_seconds"),
            registry=self.registry,
            buckets=(1, 3, 10, 30, 60, 180, 600, 1800, 3600, 4 * 3600, 24 * 3600),
        )
        self._restart_seconds = Histogram(
            *OPERATOR.metric_arguments("rlrun_restart_seconds"),
            registry=self.registry,
            buckets=(1, 3, 10, 30, 60, 120, 300, 600, 1800, 3600),
        )
        self._queue_depth = self._make_gauge("rlrun_operator_queue_depth")
        self._queue_age = self._make_gauge("rlrun_operator_queue_age_seconds")
        self._watch_age = self._make_gauge("rlrun_operator_watch_age_seconds")
        self._leader = self._make_gauge("rlrun_operator_leader")
        self._places = self._make_gauge("rlrun_operator_serves")
        self._objects = self._make_gauge("rlrun_operator_objects")
        self._stops = self._make_counter("rlrun_queue_stops_total")
        for reason in reasons.QUEUE_SUSPENSION:
            self._stops.labels(reason)
        self._runs = _Runs(store, self._seen)
        self.registry.register(self._runs)
        ProcessCollector(registry=self.registry)

    def _make_gauge(self, name: str) -> Gauge:
        return Gauge(*OPERATOR.metric_arguments(name), registry=self.registry)

    def _make_counter(self, name: str) -> Counter:
        return Counter(*OPERATOR.metric_arguments(name), registry=self.registry)

    def count_request(self, verb: str, resource: str, code: str) -> None:
        """Count one request to the API server; for an unanswered one `code` is the error."""
        self.api_requests.labels(verb, resource, code).inc()

    def observe_queue(self, depth: Callable[[], float], age: Callable[[], float], leader: Callable[[], float]) -> None:
        """Set the functions to read at each scrape. Only a leader has series of runs: a standby would count each run twice."""
        self._queue_depth.set_function(depth)
        self._queue_age.set_function(age)
        self._leader.set_function(leader)
        self._runs.leads = lambda: leader() > 0

    def observe_watch(self, resource: str, namespace: str | None, age: Callable[[], float]) -> None:
        """Set the function that returns the age of a watch at each scrape."""
        self._watch_age.labels(resource, namespace or "").set_function(age)

    def observe_places(self, held: Iterable[tuple[str, str | None]], others: Iterable[tuple[str, str | None]]) -> None:
        """Set the namespaces that this operator serves, and those that another one serves."""
        self._places.clear()
        for places, value in ((others, 0), (held, 1)):
            for namespace, named in places:
                self._places.labels(namespace, named or "").set(value)

    def observe_objects(self, counts: Mapping[str, int]) -> None:
        """Set the numbers of cached objects."""
        for kind, count in counts.items():
            self._objects.labels(kind).set(count)

    def status_written(self, key: Key, old: Mapping[str, object], new: Mapping[str, object], now: float) -> None:
        """Update the metrics after a run's status changed from `old` to `new`.

        Args:
            key: namespace and name of the run.
            old: previous status.
            new: written status.
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
        self._observe_restart(old, new)
        restarts = _read_count(new, "restarts") - _read_count(old, "restarts")
        if restarts > 0:
            failure = new.get("lastFailure")
            reason = str(failure.get("reason")) if isinstance(failure, Mapping) else ""
            totals = self._seen.total.setdefault(key, {})
            # Any client may write a status: each invented reason would otherwise become a new series.
            reason = reason if reason in failure_reasons.FAILURE_REASONS else UNKNOWN
            totals[reason] = totals.get(reason, 0) + restarts

    def _observe_restart(self, old: Mapping[str, object], new: Mapping[str, object]) -> None:
        """Observe the phases of a restart whose record has just been completed."""
        now, before = _read_restart(new), _read_restart(old)
        total, seconds = now.get("totalSeconds"), now.get("seconds")
        known = total == before.get("totalSeconds") and now.get("since") == before.get("since")
        if known or not isinstance(total, int) or not isinstance(seconds, Mapping):
            return
        for phase, value in (*((name, seconds.get(name)) for name in RESTART_PHASES), ("total", total)):
            if isinstance(value, int):
                self._restart_seconds.labels(phase).observe(value)

    def forget_run(self, key: Key) -> None:
        """Drop the state of a deleted run."""
        self._seen.total.pop(key, None)
        self._seen.phase_since.pop(key, None)


class _Runs:
    """Collector of the series about single runs."""

    def __init__(self, store: Store, seen: Failures) -> None:
        self._store = store
        self._seen = seen
        self.leads: Callable[[], bool] = lambda: True

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        families = {spec.name: RUNS.make_family(spec.name) for spec in RUNS}
        for run in self._store.runs() if self.leads() else ():
            key = run["metadata"]["namespace"], run["metadata"]["name"]
            families["rlrun_info"].add_metric([*key, _read_model(run), run["metadata"]["uid"]], 1)
            if (created := seconds_of(run["metadata"].get("creationTimestamp"))) is not None:
                families["rlrun_created_timestamp_seconds"].add_metric([*key], created)
            status = read_status(run.get("status") or {})
            for name, labels, value in (*_status_series(status), *_trainer_size(run, status)):
                families[name].add_metric([*key, *labels], value)
            if (limit := _read_budget(run)) is not None:
                families["rlrun_budget_gpu_seconds"].add_metric([*key], limit)
            for reason, count in self._seen.total.get(key, {}).items():
                families["rlrun_failures_total"].add_metric([*key, reason], count)
            for role, count in _scheduled_gpus(run, self._store.children(key)).items():
                families["rlrun_gpus_allocated"].add_metric([*key, role], count)
        yield from families.values()


def _status_series(status: RLRunStatus) -> Iterator[tuple[str, tuple[str, ...], float]]:
    """Yield the series of a run's status: metric, labels in addition to those of the run, value."""
    for phase in PHASES:
        yield "rlrun_phase", (phase,), float(phase == status.phase)
    for condition in {condition.type: condition for condition in status.conditions}.values():
        if condition.type in reasons.CONDITION_TYPES:
            reason = condition.reason if condition.reason in reasons.CONDITION_REASONS else UNKNOWN
            yield "rlrun_condition", (condition.type, condition.status, reason), 1
    yield "rlrun_attempt", (), status.attempt
    yield "rlrun_step", (), status.progress.step
    if status.progress.total_steps:
        yield "rlrun_max_steps", (), status.progress.total_steps
    if status.progress.reward is not None:
        yield "rlrun_reward_mean", (), status.progress.reward
    if (stepped := seconds_of(status.progress.last_step_time)) is not None:
        yield "rlrun_last_step_timestamp_seconds", (), stepped
    yield "rlrun_steps_lost_total", (), status.checkpoint.steps_lost_total
    counted = min(status.restarts_counted_towards_max, status.restarts)
    yield "rlrun_restarts_total", ("true",), counted
    yield "rlrun_restarts_total", ("false",), status.restarts - counted
    yield from _gpu_seconds(status)
    yield "rlrun_engines_wanted", (), status.inference.desired
    yield "rlrun_engines_ready", (), status.inference.ready
    if (spot := status.inference.spot) is not None:
        yield "rlrun_spot_engines_wanted", (), spot.desired
        yield "rlrun_spot_engines_ready", (), spot.ready
        yield "rlrun_spot_engines_lost_total", (), spot.lost
    if status.queue is not None and status.queue.position is not None:
        yield "rlrun_queue_position", (), status.queue.position
        yield "rlrun_queue_since_timestamp_seconds", (), seconds_of(status.queue.since) or 0.0


def _gpu_seconds(status: RLRunStatus) -> Iterator[tuple[str, tuple[str, ...], float]]:
    """Yield GPU time by role and use; unknown uses are skipped."""
    totals: dict[tuple[str, str], int] = {}
    for row in status.cost.attempts if status.cost is not None else ():
        for use, seconds in row.gpu_seconds.items():
            if use in get_args(Use):
                totals[row.role, use] = totals.get((row.role, use), 0) + seconds
    for (role, use), seconds in totals.items():
        yield "rlrun_gpu_seconds_total", (role, use), seconds
    rates = (status.cost.per_gpu_hour if status.cost is not None else None) or {}
    for what in ("tokens", "samples"):
        if what in rates:
            yield f"rlrun_{what}_per_gpu_hour", (), rates[what]


def _trainer_size(run: Manifest, status: RLRunStatus) -> Iterator[tuple[str, tuple[str, ...], float]]:
    """Yield wanted and current pods of the trainer, if it has any; the spec may be malformed."""
    size = status.trainer.size or status.trainer.desired
    trainer = (run.get("spec") or {}).get("trainer") or {}
    wanted = trainer.get("replicas", 1) if isinstance(trainer, Mapping) else None
    if size and isinstance(wanted, int) and not isinstance(wanted, bool) and 0 < wanted <= COUNT_MAX:
        yield "rlrun_trainer_size_wanted", (), wanted
        yield "rlrun_trainer_size", (), size


def _read_budget(run: Manifest) -> float | None:
    """Return the GPU-seconds of a run's budget, or None; the spec may be malformed."""
    budget = (run.get("spec") or {}).get("budget")
    hours = budget.get("gpuHours") if isinstance(budget, Mapping) else None
    good = isinstance(hours, int | float) and not isinstance(hours, bool)
    return float(hours) * 3600 if good and hours is not None else None


def _read_count(status: Mapping[str, object], name: str) -> int:
    """Return a count of a status, or 0; any client may have written the status."""
    value = status.get(name, 0)
    return value if isinstance(value, int) else 0


def _read_restart(status: Mapping[str, object]) -> Mapping[str, object]:
    found = status.get("lastRestart")
    return found if isinstance(found, Mapping) else {}


def _gives_back(status: Mapping[str, object]) -> str | None:
    """Return the reason with which the queue suspends a run, or None."""
    found = {c.get("type"): c.get("reason") for c in raw_conditions(dict(status))}.get(reasons.ADMITTED)
    return str(found) if found in reasons.QUEUE_SUSPENSION else None


def _read_model(run: Manifest) -> str:
    model = (run.get("spec") or {}).get("model")
    if not isinstance(model, Mapping):
        return ""
    return str(model.get("name") or model.get("path") or ("tiny" if "tiny" in model else ""))


def _scheduled_gpus(run: Manifest, children: Iterable[Manifest]) -> dict[str, int]:
    """Return the GPUs of scheduled pods that have not ended, by role."""
    counts: dict[str, int] = {}
    named = resource_of(run)
    for pod in children:
        if pod["kind"] != POD.kind or (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed"):
            continue
        spec = pod.get("spec") or {}
        role = (pod["metadata"].get("labels") or {}).get(ROLE_LABEL, "")
        # Any client may write this label; an unknown value must not become a label of a series.
        if spec.get("nodeName") and role in ROLES and (count := gpus_of(spec, named)):
            counts[role] = counts.get(role, 0) + count
    return counts
