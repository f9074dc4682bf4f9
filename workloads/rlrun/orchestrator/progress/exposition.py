"""The orchestrator's Prometheus metrics: each declared once, and made of the run's progress at each scrape."""

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
"""Metric, values of its labels, value."""
ROLES = ("trainer", "inference", "orchestrator")
MAX_ENVIRONMENTS = 64
"""Environments that have series; those that come first."""


def _gauge_spec(name: str, text: str, *labels: str, unit: Unit = "") -> MetricSpec:
    return MetricSpec(name, "gauge", text, labels, unit)


def _counter_spec(name: str, text: str, unit: Unit = "") -> MetricSpec:
    return MetricSpec(name, "counter", text, (), unit)


_OF_STEP: Mapping[str, tuple[str, MetricSpec]] = {
    "rlrun_loss": ("loss", _gauge_spec("rlrun_loss", "Loss of the last trained step")),
    "rlrun_gradient_norm": ("grad_norm", _gauge_spec("rlrun_gradient_norm", "Norm of its gradient, before clipping")),
    "rlrun_learning_rate": ("lr", _gauge_spec("rlrun_learning_rate", "Its learning rate")),
    "rlrun_entropy": ("entropy", _gauge_spec("rlrun_entropy", "Entropy of the policy, mean over its loss tokens")),
    "rlrun_mismatch_kl": (
        "mismatch_kl",
        _gauge_spec("rlrun_mismatch_kl", "How far trainer and engines disagree about its tokens' probabilities, mean"),
    ),
    "rlrun_completion_tokens_mean": (
        "completion_length/mean",
        _gauge_spec("rlrun_completion_tokens_mean", "Tokens sampled per rollout, mean of its batch", unit="tokens"),
    ),
    "rlrun_truncated_ratio": (
        "batch/truncated",
        _gauge_spec("rlrun_truncated_ratio", "Share of its rollouts that a limit of tokens has cut off", unit="ratio"),
    ),
    "rlrun_unsolved_groups_ratio": (
        "batch/solve_none",
        _gauge_spec("rlrun_unsolved_groups_ratio", "Share of its groups in which no rollout is solved", unit="ratio"),
    ),
    "rlrun_mfu_ratio": ("perf/mfu", _gauge_spec("rlrun_mfu_ratio", "Its model FLOPs utilization", unit="ratio")),
}
"""Values of the last line of metrics.jsonl."""

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
        _gauge_spec("rlrun_staleness_mean", "Versions between sampling and training, mean over the last step's tokens"),
    ),
    "rlrun_rollouts_in_flight": ("in_flight", _gauge_spec("rlrun_rollouts_in_flight", "Rollouts in flight")),
    "rlrun_eta_seconds": (
        "eta_seconds",
        _gauge_spec("rlrun_eta_seconds", "Estimated time to the last step", unit="seconds"),
    ),
    "rlrun_rollout_errors_total": (
        "errors",
        _counter_spec("rlrun_rollout_errors_total", "Rollouts that ended in an error since the run began"),
    ),
    "rlrun_rollouts_readmitted_total": (
        "readmitted",
        _counter_spec(
            "rlrun_rollouts_readmitted_total", "Finished rollouts that restarts gave back since the run began"
        ),
    ),
    "rlrun_rollouts_discarded_total": (
        "discarded",
        _counter_spec("rlrun_rollouts_discarded_total", "Finished rollouts that restarts lost since the run began"),
    ),
}
"""Fields of the progress."""

ORCHESTRATOR = MetricTable(
    *(spec for _, spec in _OF_PROGRESS.values()),
    *(spec for _, spec in _OF_STEP.values()),
    _gauge_spec("rlrun_environment_reward_mean", "Mean reward of the last trained step, by environment", "environment"),
    _gauge_spec("rlrun_eval_reward_mean", "Latest held-out mean reward", "environment"),
    _gauge_spec("rlrun_waiting", "1 for the role whose work the next step waits for", "on"),
    _counter_spec("rlrun_trainer_steps_total", "Steps trained in this attempt"),
    _counter_spec("rlrun_trainer_step_seconds_total", "Time of these steps, waits included", unit="seconds"),
    _counter_spec("rlrun_trainer_wait_seconds_total", "Time that the trainer waited for their batches", unit="seconds"),
    _gauge_spec("rlrun_engines", "Engines by state: serving, updating (weights), out (of rotation)", "state"),
    _gauge_spec(
        "rlrun_engine_requests", "Continuations that engines were asked for, by state: running, waiting", "state"
    ),
    _gauge_spec("rlrun_engine_kv_cache_ratio", "Share of the KV cache in use, of the fullest engine", unit="ratio"),
    _gauge_spec("rlrun_engine_load", "Load of the engines over the last steps", "measure"),
    _gauge_spec("rlrun_volume_free_bytes", "Space that is left on the run's volume", unit="bytes"),
    _gauge_spec("rlrun_volume_size_bytes", "Size of the run's volume", unit="bytes"),
    _gauge_spec("rlrun_volume_trouble", "1 for what is wrong with the run's volume, 0 for all else", "reason"),
)
"""Every metric of the orchestrator; run, role and attempt are labels of the scraped pod."""


@dataclass
class StepTotals:
    """Sums over the steps that this attempt has trained, in seconds."""

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
    """One engine at one look."""

    state: str
    """serving, updating or out."""
    running: int | None
    """Continuations under way; None: the engine did not say."""
    waiting: int | None
    """Continuations in the engine's own queue."""
    kv_usage: float | None
    """Share of the KV cache in use."""


def engine_loads(replicas: Sequence[Replica]) -> list[EngineLook]:
    """Load of each engine."""
    loads = []
    for replica in replicas:
        state = "updating" if replica.updating else "serving" if replica.open else "out"
        said = replica.metrics
        if said is None:  # what it was asked for is known here, too
            loads.append(EngineLook(state, replica.load, None, None))
        else:
            loads.append(EngineLook(state, said.running, said.waiting, said.kv_usage))
    return loads


@dataclass(frozen=True)
class Measures:
    """One look at the parts of an attempt, beside its progress."""

    step: Mapping[str, float] = field(default_factory=dict)
    """The last line of metrics.jsonl."""
    totals: StepTotals = field(default_factory=StepTotals)
    engines: Sequence[EngineLook] = ()
    volume: tuple[int, int] | None = None
    """Free and all bytes of the run's volume; None: not known."""


class Reported(Protocol):
    """The part of the progress that is read by name."""

    @property
    def eval(self) -> Mapping[str, float]: ...

    @property
    def waiting_role(self) -> str | None: ...

    @property
    def engine_load(self) -> Mapping[str, float] | None: ...


def metrics_text(progress: Reported, measures: Measures, trouble: str | None = None) -> bytes:
    """Prometheus text; what is not known yet is left out.

    Args:
        progress: of the run.
        measures: of the same moment.
        trouble: what is wrong with the volume, a reason of `Trouble`.
    """
    families = {spec.name: ORCHESTRATOR.family(spec.name) for spec in ORCHESTRATOR}
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
