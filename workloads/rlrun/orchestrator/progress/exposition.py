"""Prometheus metrics of the orchestrator, each declared once and computed from the run's progress at each scrape."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric

from rlrun.orchestrator.engines.replica import Replica
from rlrun.protocol.files.volume_faults import STORAGE_REASONS
from rlrun.runtime.metric_table import MetricSpec, MetricTable, Unit

Series = tuple[str, tuple[str, ...], float]
"""Metric name, label values, value."""
ROLES = ("trainer", "inference", "orchestrator")
MAX_ENVIRONMENTS = 64
"""Limit of environments with series; the first ones are used."""


def _gauge_spec(name: str, text: str, *labels: str, unit: Unit = "") -> MetricSpec:
    return MetricSpec(name, "gauge", text, labels, unit)


def _counter_spec(name: str, text: str, unit: Unit = "") -> MetricSpec:
    return MetricSpec(name, "counter", text, (), unit)


_OF_STEP: Mapping[str, tuple[str, MetricSpec]] = {
    "rlrun_loss": ("loss", _gauge_spec("rlrun_loss", "Loss of the last trained step")),
    "rlrun_gradient_norm": (
        "grad_norm",
        _gauge_spec("rlrun_gradient_norm", "Gradient norm of the last trained step, before clipping"),
    ),
    "rlrun_learning_rate": ("lr", _gauge_spec("rlrun_learning_rate", "Learning rate of the last trained step")),
    "rlrun_entropy": ("entropy", _gauge_spec("rlrun_entropy", "Entropy of the policy, mean over its loss tokens")),
    "rlrun_mismatch_kl": (
        "mismatch_kl",
        _gauge_spec("rlrun_mismatch_kl", "Mean KL divergence between the token probabilities of trainer and engines"),
    ),
    "rlrun_completion_tokens_mean": (
        "completion_length/mean",
        _gauge_spec(
            "rlrun_completion_tokens_mean", "Mean number of tokens sampled per rollout of the last batch", unit="tokens"
        ),
    ),
    "rlrun_truncated_ratio": (
        "batch/truncated",
        _gauge_spec(
            "rlrun_truncated_ratio", "Share of the last batch's rollouts cut off by a token limit", unit="ratio"
        ),
    ),
    "rlrun_unsolved_groups_ratio": (
        "batch/solve_none",
        _gauge_spec(
            "rlrun_unsolved_groups_ratio", "Share of the last batch's groups without a solved rollout", unit="ratio"
        ),
    ),
    "rlrun_mfu_ratio": (
        "perf/mfu",
        _gauge_spec("rlrun_mfu_ratio", "Model FLOPs utilization of the last trained step", unit="ratio"),
    ),
}
"""Metrics from the last line of metrics.jsonl."""

_OF_PROGRESS: Mapping[str, tuple[str, MetricSpec]] = {
    "rlrun_step": ("step", _gauge_spec("rlrun_step", "Last trained step")),
    "rlrun_max_steps": ("max_steps", _gauge_spec("rlrun_max_steps", "Steps of the run")),
    "rlrun_reward_mean": ("reward", _gauge_spec("rlrun_reward_mean", "Mean reward of the last trained step")),
    "rlrun_policy_version": (
        "policy_version",
        _gauge_spec("rlrun_policy_version", "Newest policy version that an engine holds"),
    ),
    "rlrun_checkpoint_step": (
        "checkpoint_step",
        _gauge_spec("rlrun_checkpoint_step", "Step of the newest complete checkpoint"),
    ),
    "rlrun_tokens_per_second": (
        "tokens_per_second",
        _gauge_spec("rlrun_tokens_per_second", "Tokens trained per second in the last step", unit="tokens"),
    ),
    "rlrun_staleness_mean": (
        "staleness_mean",
        _gauge_spec(
            "rlrun_staleness_mean", "Mean number of versions between sampling and training of the last step's tokens"
        ),
    ),
    "rlrun_rollouts_in_flight": ("in_flight", _gauge_spec("rlrun_rollouts_in_flight", "Rollouts in flight")),
    "rlrun_eta_seconds": (
        "eta_seconds",
        _gauge_spec("rlrun_eta_seconds", "Estimated time to the last step", unit="seconds"),
    ),
    "rlrun_rollout_errors_total": (
        "errors",
        _counter_spec("rlrun_rollout_errors_total", "Rollouts that ended in an error since the start of the run"),
    ),
    "rlrun_rollouts_readmitted_total": (
        "readmitted",
        _counter_spec(
            "rlrun_rollouts_readmitted_total", "Finished rollouts that restarts reused since the start of the run"
        ),
    ),
    "rlrun_rollouts_discarded_total": (
        "discarded",
        _counter_spec(
            "rlrun_rollouts_discarded_total", "Finished rollouts that restarts lost since the start of the run"
        ),
    ),
}
"""Metrics from fields of the progress."""

ORCHESTRATOR = MetricTable(
    *(spec for _, spec in _OF_PROGRESS.values()),
    *(spec for _, spec in _OF_STEP.values()),
    _gauge_spec("rlrun_environment_reward_mean", "Mean reward of the last trained step, by environment", "environment"),
    _gauge_spec("rlrun_eval_reward_mean", "Latest held-out mean reward", "environment"),
    _gauge_spec("rlrun_waiting", "1 for the role that the next step waits for, otherwise 0", "on"),
    _counter_spec("rlrun_trainer_steps_total", "Steps trained in this attempt"),
    _counter_spec("rlrun_trainer_step_seconds_total", "Time of the trained steps, waits included", unit="seconds"),
    _counter_spec("rlrun_trainer_wait_seconds_total", "Time that the trainer waited for batches", unit="seconds"),
    _gauge_spec("rlrun_engines", "Engines by state: serving, updating (weights), out (of rotation)", "state"),
    _gauge_spec(
        "rlrun_engine_requests", "Continuations requested from the engines, by state: running, waiting", "state"
    ),
    _gauge_spec("rlrun_engine_kv_cache_ratio", "KV cache usage of the fullest engine", unit="ratio"),
    _gauge_spec("rlrun_engine_load", "Load of the engines over the last steps", "measure"),
    _gauge_spec("rlrun_volume_free_bytes", "Free space of the run's volume", unit="bytes"),
    _gauge_spec("rlrun_volume_size_bytes", "Size of the run's volume", unit="bytes"),
    _gauge_spec("rlrun_volume_trouble", "1 for the current problem of the run's volume, 0 for other reasons", "reason"),
)
"""All metrics of the orchestrator. Run, role and attempt are labels of the scraped pod."""


@dataclass
class StepTotals:
    """Sums over the trained steps of this attempt, in seconds."""

    steps: int = 0
    step_seconds: float = 0.0
    wait_seconds: float = 0.0

    def trained(self, metrics: Mapping[str, float]) -> None:
        """Add a step."""
        self.steps += 1
        self.step_seconds += metrics.get("time/step", 0.0)
        self.wait_seconds += metrics.get("time/wait_for_batch", 0.0)


@dataclass(frozen=True)
class EngineLook:
    """State of one engine at one moment."""

    state: str
    """serving, updating or out."""
    running: int | None
    """Running continuations; None if not reported."""
    waiting: int | None
    """Continuations in the engine's queue."""
    kv_usage: float | None
    """Share of the KV cache in use."""


def engine_loads(replicas: Sequence[Replica]) -> list[EngineLook]:
    """Return the load of each engine."""
    loads = []
    for replica in replicas:
        state = "updating" if replica.updating else "serving" if replica.open else "out"
        report = replica.metrics
        if report is None:  # the number of requested continuations is known without a report
            loads.append(EngineLook(state, replica.load, None, None))
        else:
            loads.append(EngineLook(state, report.running, report.waiting, report.kv_usage))
    return loads


@dataclass(frozen=True)
class Measures:
    """State of an attempt's parts in addition to its progress."""

    step: Mapping[str, float] = field(default_factory=dict)
    """Last line of metrics.jsonl."""
    totals: StepTotals = field(default_factory=StepTotals)
    engines: Sequence[EngineLook] = ()
    volume: tuple[int, int] | None = None
    """Free and total bytes of the run's volume, or None if unknown."""


class Reported(Protocol):
    """Fields of the progress that are read by name."""

    @property
    def eval(self) -> Mapping[str, float]: ...

    @property
    def waiting_role(self) -> str | None: ...

    @property
    def engine_load(self) -> Mapping[str, float] | None: ...


def metrics_text(progress: Reported, measures: Measures, trouble: str | None = None) -> bytes:
    """Return the metrics as Prometheus text, without unknown values.

    Args:
        progress: progress of the run.
        measures: other values of the same moment.
        trouble: problem of the volume, a reason of `Trouble`.
    """
    families = {spec.name: ORCHESTRATOR.make_family(spec.name) for spec in ORCHESTRATOR}
    for found in (
        _of_progress(progress),
        _of_steps(measures),
        _of_engines(measures.engines),
        _of_volume(measures, trouble),
    ):
        for name, labels, value in found:
            families[name].add_metric(list(labels), value)

    class Collector:
        def collect(self) -> Iterator[Metric]:
            yield from families.values()

    registry = CollectorRegistry()
    registry.register(Collector())
    return generate_latest(registry)


def _of_progress(progress: Reported) -> Iterator[Series]:
    for name, (attribute, _) in _OF_PROGRESS.items():
        if (value := getattr(progress, attribute)) is not None:
            yield name, (), float(value)
    for environment, reward in _limit_environments(progress.eval):
        yield "rlrun_eval_reward_mean", (environment,), reward
    for role in ROLES:
        yield "rlrun_waiting", (role,), float(role == progress.waiting_role)
    for measure, load in (progress.engine_load or {}).items():
        yield "rlrun_engine_load", (measure,), load


def _of_steps(measures: Measures) -> Iterator[Series]:
    for name, (key, _) in _OF_STEP.items():
        if key in measures.step:
            yield name, (), measures.step[key]
    rewards = {
        key.removeprefix("reward/").removesuffix("/mean"): value
        for key, value in measures.step.items()
        if key.startswith("reward/") and key.endswith("/mean") and key != "reward/mean"
    }
    for environment, reward in _limit_environments(rewards):
        yield "rlrun_environment_reward_mean", (environment,), reward
    yield "rlrun_trainer_steps_total", (), measures.totals.steps
    yield "rlrun_trainer_step_seconds_total", (), measures.totals.step_seconds
    yield "rlrun_trainer_wait_seconds_total", (), measures.totals.wait_seconds


def _of_engines(engines: Sequence[EngineLook]) -> Iterator[Series]:
    if not engines:
        return
    for state in ("serving", "updating", "out"):
        yield "rlrun_engines", (state,), sum(engine.state == state for engine in engines)
    for state in ("running", "waiting"):
        counts = [count for engine in engines if (count := getattr(engine, state)) is not None]
        if counts:
            yield "rlrun_engine_requests", (state,), sum(counts)
    if usages := [engine.kv_usage for engine in engines if engine.kv_usage is not None]:
        yield "rlrun_engine_kv_cache_ratio", (), max(usages)


def _of_volume(measures: Measures, trouble: str | None) -> Iterator[Series]:
    if measures.volume is not None:
        yield "rlrun_volume_free_bytes", (), measures.volume[0]
        yield "rlrun_volume_size_bytes", (), measures.volume[1]
    for reason in STORAGE_REASONS:
        yield "rlrun_volume_trouble", (reason,), float(reason == trouble)


def _limit_environments(values: Mapping[str, float]) -> list[tuple[str, float]]:
    return list(values.items())[:MAX_ENVIRONMENTS]
