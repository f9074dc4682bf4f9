"""Data flow of a supervised run: batches are made a few steps ahead of the trainer.

Everything runs in one event loop; rows are read, tokenized and written in a thread, one batch at a time.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from loguru import logger

from rlrun.config.models.roles import OrchestratorConfig
from rlrun.orchestrator.aio.event_loop import Signal
from rlrun.orchestrator.aio.volume_access import BestEffortWriter, clean_up, in_thread, retry_until_done, worst_trouble
from rlrun.orchestrator.checkpoint import PartWriter, remove_batches
from rlrun.orchestrator.progress.exposition import Measures
from rlrun.orchestrator.progress.metrics_file import MetricsFile
from rlrun.orchestrator.progress.progress_server import Progress, StepClock, waiting_reason
from rlrun.orchestrator.progress.run_snapshot import Activity
from rlrun.orchestrator.sft.samples import Position, Reader, Snapshot, batch_metrics, write_snapshot
from rlrun.orchestrator.trainer.trainer_client import (
    Since,
    TrainerClient,
    TrainerGoneError,
    Waiting,
    is_idle,
    of_trainer,
)
from rlrun.protocol.files.attempts import Attempt
from rlrun.protocol.files.batch import Batch, BatchError, Sample, Validation, write_batch
from rlrun.protocol.files.failures import RoleError
from rlrun.protocol.files.paths import RunPaths
from rlrun.protocol.files.volume_faults import Volume
from rlrun.protocol.messages.trainer_channel import Event
from rlrun.runtime import exit_codes

STEPS_AHEAD = 4
"""Limit of batches that wait for the trainer."""
_OF_SAMPLING = "mismatch_kl"
"""Start of the names of metrics of the trainer that compare with sampled log-probabilities, which do not exist here."""


@dataclass(frozen=True)
class TrainingData:
    """Training data of an attempt."""

    reader: Reader
    """Reader of the rows at the attempt's position."""
    fingerprints: tuple[str, ...]
    """Fingerprints of the sources."""
    expected_steps: int | None
    """Number of steps for which the data suffices, or None if unknown."""
    validation: tuple[Sample, ...]
    """Validation samples; empty without validation data."""


class DataPipeline:
    """Data flow of one attempt, from the trainer's first event to the end.

    Args:
        config: configuration of the role, with `data`.
        attempt: content of the attempt's file.
        data: training data.
        trainer: client of the ready trainer.
        signal: signal notified of every change.
        volume: volume of the run's folder. While it refuses, writes that the run needs wait.
    """

    def __init__(
        self,
        config: OrchestratorConfig,
        attempt: Attempt,
        data: TrainingData,
        *,
        trainer: TrainerClient,
        signal: Signal,
        volume: Volume,
    ) -> None:
        assert config.data is not None
        self.config, self.data, self.attempt, self.trainer = config, config.data, attempt, trainer
        self._paths = RunPaths(Path(config.output_dir))
        self._volume, self._writer = volume, BestEffortWriter()
        self._parts = PartWriter(volume, trainer.checkpoint_saved)
        self._reader, self._fingerprints, self._signal = data.reader, data.fingerprints, signal
        expected = data.expected_steps
        self._expected_steps = None if expected is None else min(expected, config.max_steps)
        self._validation = data.validation
        self._made = self._trained = attempt.base_step
        self._last_step: int | None = config.max_steps if attempt.base_step >= config.max_steps else None
        """Last step, known after its batch is made."""
        self._snapshots: dict[int, Position] = {}
        self._metrics = MetricsFile(
            self._paths.metrics,
            attempt=attempt.attempt,
            base_step=attempt.base_step,
            unwritten=(),
            evaluated=lambda version: version == 0 and bool(data.validation),
            writer=self._writer,
        )
        self._finished = False
        self._checkpoint_step = attempt.base_step if attempt.base_attempt is not None else None
        self._clock, self._since, self._activity = StepClock(), Since(), Activity()

    async def run(self) -> bool:
        """Run until the last checkpoint is complete, or until `stop`.

        Returns:
            Whether all work is done.

        Raises:
            RoleError: the run cannot continue; possibly inside an exception group.
        """
        if self._last_step is None and await in_thread(lambda: self._reader.exhausted):
            logger.info(f"the data is exhausted at step {self.attempt.base_step}; the run ends without another step")
            return True
        try:
            await self._run_tasks()
        finally:
            await in_thread(self._writer.close)
        if self._is_done():
            logger.info("all steps are trained and saved")
        return self._is_done()

    # The trainer's events and the checkpoint writer outlive the batches: after a stop they complete the last checkpoint.
    async def _run_tasks(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            following, making = tasks.create_task(self._follow_trainer()), tasks.create_task(self._make_batches())
            saving = tasks.create_task(self._parts.run())
            await self._signal.until(lambda: self._is_done() or self.trainer.ending)
            making.cancel()
            if self.trainer.ending:
                await self.trainer.stop_and_wait(following, self.config.checkpoint.grace_period_seconds)
            following.cancel()
            saving.cancel()

    def stop(self) -> None:
        """Stop making batches; only let the trainer, which also stops, complete its last checkpoint."""
        self.trainer.ending = True
        self._signal.notify()

    def _is_done(self) -> bool:
        saved = not self.config.checkpoint.enabled or self._checkpoint_step == self._last_step
        return self._finished and saved and not self._metrics.pending()

    # ---- events of the trainer

    async def _follow_trainer(self) -> None:
        with suppress(TrainerGoneError):
            async for event in self.trainer.events():
                await self._handle_event(event)
                self._signal.notify()

    async def _handle_event(self, event: Event) -> None:
        match event.kind:
            case "validated":
                # After a restart the base version may be measured again, but its line is written only once.
                if event.step == 0 and self._metrics.wants_base:
                    self._metrics.add(0, "evaluation", event.metrics)
            case "trained":
                self._trained = event.step
                self._clock.trained(event.step, event.metrics)
                metrics = {name: value for name, value in event.metrics.items() if not name.startswith(_OF_SAMPLING)}
                self._metrics.add(event.step, "trained", metrics)
                if not self.config.record_rollouts:
                    await clean_up("delete trained batches", partial(remove_batches, self._paths, through=event.step))
                if not self.config.checkpoint.enabled:
                    self._snapshots.pop(event.step, None)
            case "checkpoint_saved":
                self._save_snapshot(event)
            case "checkpoint_complete":
                self._checkpoint_step = event.step
            case "finished":
                self._finished = True

    def _save_snapshot(self, event: Event) -> None:
        position = self._snapshots.get(event.step)
        if position is None or event.path is None:
            logger.error(
                f"the checkpoint of step {event.step} stays incomplete: the orchestrator has no snapshot of it"
            )
            return
        snapshot = Snapshot(event.step, position, self._fingerprints)
        self._parts.put(event.step, partial(write_snapshot, Path(event.path), snapshot))
        self._snapshots = {step: position for step, position in self._snapshots.items() if step > event.step}

    # ---- batches

    async def _make_batches(self) -> None:
        if self._validation:
            await self._write_validation()
        while self._last_step is None:
            await self._signal.until(lambda: self._made - self._trained < STEPS_AHEAD)
            began, step = time.monotonic(), self._made + 1
            batch = await in_thread(partial(self._make_batch, step))
            await self._write_batch(f"write the batch of step {step}", self._paths.batch(step, batch.attempt), batch)
            self._made = step
            self._snapshots[step] = self._reader.position
            if batch.last:
                self._last_step = step
            counters = self._reader.position.counters
            metrics = batch_metrics(batch.samples) | {f"data/{name}": float(count) for name, count in counters.items()}
            metrics |= {"data/epoch": self._reader.epoch, "time/make_batch": time.monotonic() - began}
            self._metrics.add(step, "batch", metrics)
            await self.trainer.batch_ready(step, str(self._paths.batch(step, self.attempt.attempt)))
            self._signal.notify()

    def _make_batch(self, step: int) -> Batch:
        samples = self._reader.batch()
        last = step >= self.config.max_steps or self._reader.exhausted
        return Batch(
            step,
            self.attempt.attempt,
            samples,
            total_steps=step if last else self._expected_steps,
            last=last,
            validation=self._validation_around(step, last=last),
        )

    def _validation_around(self, step: int, *, last: bool) -> Validation | None:
        if not self._validation or self.data.validation is None:
            return None
        before = step == 1 and self._metrics.wants_base
        after = last or step % self.data.validation.interval == 0
        path = str(self._paths.validation(self.attempt.attempt))
        return Validation(path, before=before, after=after) if before or after else None

    async def _write_validation(self) -> None:
        await in_thread(self._remove_old_validation)
        batch = Batch(0, self.attempt.attempt, self._validation)
        await self._write_batch("write the validation samples", self._paths.validation(self.attempt.attempt), batch)

    def _remove_old_validation(self) -> None:
        for old in self._paths.rollouts.glob("validation.a*"):
            if old.name < self._paths.validation(self.attempt.attempt).name:
                shutil.rmtree(old, ignore_errors=True)

    async def _write_batch(self, doing: str, path: Path, batch: Batch) -> None:
        try:
            await retry_until_done(self._volume, doing, partial(write_batch, path, batch))
        except BatchError as error:
            raise RoleError(str(error), exit_codes.DATA) from error

    # ---- progress

    def measures(self) -> Measures:
        """Return the values for the metrics in addition to the progress."""
        return Measures(self._metrics.last, self._clock.totals, volume=self._volume.space)

    def progress(self) -> Progress:
        """Return the current progress of the run."""
        total = self._last_step or self._expected_steps or self.config.max_steps
        waiting, state = self._waiting_reason(), self.trainer.state
        trouble = worst_trouble(self._volume.trouble(), state.trouble() if state is not None else None)
        return Progress(
            step=self._trained,
            max_steps=total,
            policy_version=None,
            checkpoint_step=self._checkpoint_step,
            resumed_from_step=self.attempt.base_step if self.attempt.base_attempt is not None else None,
            reward=None,
            eval={},
            tokens_per_second=self._metrics.last.get("perf/throughput"),
            staleness_mean=None,
            waiting_on=waiting_reason(waiting, trouble),
            storage=trouble,
            eta_seconds=self._clock.remaining_seconds(total),
            in_flight=0,
            errors=0,
            waiting_role=waiting.role,
            waiting_phase=waiting.phase,
            waiting_since=waiting.since,
            start_seconds=self._clock.start,
            tokens=self._metrics.tokens or None,
            samples=self._metrics.samples or None,
            activity=self._activity.update(
                self._trained,
                made=self._made,
                checkpoint=self._checkpoint_step,
                **({f"trainer/{state.phase}": state.part} if state is not None else {}),
            ),
        )

    def _waiting_reason(self) -> Waiting:
        state = self.trainer.state
        if self._trained < self._made and state is not None and not is_idle(state):
            return of_trainer(state, self._trained + 1, time.time())
        if self._last_step is not None:
            return self._since.waiting("trainer", "last checkpoint")
        return self._since.waiting("orchestrator", f"data for step {self._made + 1}")
