"""Snapshot of the run for people and for stall detection: the completed work and the reason why the next step waits.

A stall is detected only from the progress counter (`Activity.count`), never from the other values.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from rlrun.orchestrator.aio.volume_access import worst_trouble
from rlrun.orchestrator.engines.draining import Drain
from rlrun.orchestrator.engines.load_meter import LoadMeter
from rlrun.orchestrator.engines.weight_sync import WeightSync
from rlrun.orchestrator.groups.groups import Groups
from rlrun.orchestrator.progress.exposition import Measures, engine_loads
from rlrun.orchestrator.progress.metrics_file import MetricsFile
from rlrun.orchestrator.progress.progress_server import Progress, StepClock, waiting_reason
from rlrun.orchestrator.progress.step_metrics import discarded_rollouts
from rlrun.orchestrator.rollouts.context import RunContext
from rlrun.orchestrator.trainer.trainer_client import Since, Waiting, is_idle, of_trainer
from rlrun.protocol.files.volume_faults import Trouble


class Activity:
    """Progress counter of an attempt.

    Within a step each mark counts only if it is higher than ever before. A step therefore has a bounded number of
    moves, and repeated work (filtered rollouts, engines that come and go) does not count.
    """

    def __init__(self) -> None:
        self.count = 0
        self._step: int | None = None
        self._best: dict[str, int] = {}

    def update(self, step: int, **marks: int | None) -> int:
        """Update the counter with the marks of the step after `step`, and return it. None: unknown mark."""
        if step != self._step:
            self._step, self._best = step, {}
            self.count += 1
        for name, value in marks.items():
            if value is not None and value > self._best.get(name, -1):
                self._best[name] = value
                self.count += 1
        return self.count


@dataclass(frozen=True)
class EngineReports:
    """Parts of the run that report on the engines."""

    sync: WeightSync
    meter: LoadMeter
    drain: Drain

    def load(self) -> dict[str, float] | None:
        """Return the load of the engines, see `Progress.engine_load`."""
        found = self.meter.report()
        return found.model_dump() if found is not None else None


class EvaluationCounts(Protocol):
    """Counts of the evaluations during training, see `evaluation_schedule.Evaluations`, which imports this package."""

    @property
    def pending(self) -> int:
        """Number of requested and unfinished evaluations."""

    @property
    def answered(self) -> int:
        """Number of answers so far."""

    @property
    def rewards(self) -> Mapping[str, float]:
        """Latest mean reward of each environment."""


class Standing:
    """Read-only view of all parts of the run. Only the events `trained` and `saved` are passed to it.

    Args:
        context: context of the attempt.
        groups: state of the groups.
        evaluations: counts of the evaluations.
        engines: reports on the engines.
        metrics: metrics of the steps.
    """

    def __init__(
        self,
        context: RunContext,
        groups: Groups,
        *,
        evaluations: EvaluationCounts,
        engines: EngineReports,
        metrics: MetricsFile,
    ) -> None:
        self._config, self._pool = context.config, context.pool
        self._trainer, self._volume = context.trainer, context.volume
        self._groups, self._evaluations, self._metrics = groups, evaluations, metrics
        self._sync, self._engines = engines.sync, engines
        attempt = context.attempt
        self._resumed_from = attempt.base_step if attempt.base_attempt is not None else None
        self._step, self._checkpoint_step = attempt.base_step, self._resumed_from
        self._clock, self._since, self._activity = StepClock(), Since(), Activity()

    def trained(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record that a step is trained, with the trainer's metrics."""
        self._step = step
        self._clock.trained(step, metrics)

    def saved(self, step: int) -> None:
        """Record that the checkpoint of a step is complete."""
        self._checkpoint_step = step

    def progress(self) -> Progress:
        """Return the current progress of the run."""
        last, waiting, state, trouble = (
            self._metrics.last,
            self._waiting_reason(),
            self._trainer.state,
            self._current_trouble(),
        )
        counters = self._groups.ledger.counters
        return Progress(
            step=self._step,
            max_steps=self._config.max_steps,
            policy_version=self._pool.version,
            checkpoint_step=self._checkpoint_step,
            resumed_from_step=self._resumed_from,
            reward=last.get("reward/mean"),
            eval=dict(self._evaluations.rewards),
            tokens_per_second=last.get("perf/throughput"),
            staleness_mean=last.get("off_policy/mean"),
            waiting_on=waiting_reason(waiting, trouble),
            storage=trouble,
            eta_seconds=self._clock.remaining_seconds(self._config.max_steps),
            in_flight=self._groups.running,
            errors=counters["errors"],
            readmitted=counters["readmitted"],
            discarded=discarded_rollouts(counters),
            waiting_role=waiting.role,
            waiting_phase=waiting.phase,
            waiting_since=waiting.since,
            start_seconds=self._clock.start,
            tokens=self._metrics.tokens or None,
            samples=self._metrics.samples or None,
            engine_load=self._engines.load(),
            engines_drained=self._engines.drain.drained(),
            activity=self._activity.update(
                self._step,
                made=self._groups.made,
                accepted=self._groups.accepted,
                version=self._pool.version,
                answers=self._evaluations.answered,
                checkpoint=self._checkpoint_step,
                **({f"trainer/{state.phase}": state.part} if state is not None else {}),
            ),
        )

    def measures(self) -> Measures:
        """Return the values for the metrics in addition to the progress."""
        loads = engine_loads(self._pool.replicas)
        return Measures(self._metrics.last, self._clock.totals, loads, self._volume.space)

    def _current_trouble(self) -> Trouble | None:
        """Return the problem of the volume, seen by this role or by the trainer."""
        state = self._trainer.state
        return worst_trouble(self._volume.trouble(), state.trouble() if state is not None else None)

    def _waiting_reason(self) -> Waiting:
        # The first cause in the order of the data flow: weights, engines, trainer, batch, evaluation, rollouts.
        state, waits, made = self._trainer.state, self._since.waiting, self._groups.made
        if self._sync.newest is None:
            if state is not None and is_idle(state):
                return waits("orchestrator", "the first weights of the trainer")
            return waits("trainer", "starting") if state is None else of_trainer(state, self._step, time.time())
        if self._sync.resting and state is not None and not is_idle(state):
            return of_trainer(state, made, time.time())
        if self._pool.version is None and not self._config.replay:
            return waits("inference", f"weights of version {self._sync.newest}", self._pool.problems())
        if state is not None and not is_idle(state) and self._step < made:
            return of_trainer(state, self._step + 1, time.time())
        if max(self._step, state.step if state is not None else made) < made:
            return waits("orchestrator", f"the batch of step {made}")
        if self._evaluations.pending:
            answers = f"{self._evaluations.answered} answers so far"
            version = self._pool.version  # None: the engines of recorded batches have no version yet
            return waits(
                "orchestrator", "evaluation" if version is None else f"evaluation of version {version}", answers
            )
        if made >= self._config.max_steps:
            return waits("trainer", "last checkpoint")
        return waits("orchestrator", f"rollouts for step {made + 1}", self._describe_rollouts())

    def _describe_rollouts(self) -> str:
        groups, counters = self._groups, self._groups.ledger.counters
        kept, lost, oldest = counters["readmitted"], discarded_rollouts(counters), groups.oldest()
        return (
            f"{groups.buffered} of {self._config.batch_size} done, {groups.running} in flight"
            + (f"; oldest: {oldest}" if oldest is not None else "")
            + (f"; restarts reused {kept} finished rollouts and lost {lost}" if kept or lost else "")
        )
