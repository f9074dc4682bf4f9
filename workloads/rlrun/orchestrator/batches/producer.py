"""From groups that finish to the batch of the next step, durable and announced; after a restart first from what earlier attempts left."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from loguru import logger

from rlrun.config.roles import OrchestratorConfig
from rlrun.config.rollout import solved_rewards
from rlrun.orchestrator.aio.best_effort_writer import Courtesy
from rlrun.orchestrator.aio.condition import Signal
from rlrun.orchestrator.aio.volume import in_thread, insist
from rlrun.orchestrator.batches.assemble import assemble, choose_first, split_by_age
from rlrun.orchestrator.batches.filters import filter_metrics, rules_of
from rlrun.orchestrator.batches.replay import Recording
from rlrun.orchestrator.checkpoint import state
from rlrun.orchestrator.checkpoint.state import Snapshot
from rlrun.orchestrator.engines.gpu_turns import GPUTurns
from rlrun.orchestrator.engines.pool import EnginePool
from rlrun.orchestrator.engines.weight_sync import WeightSync
from rlrun.orchestrator.journal.ledger import Ledger
from rlrun.orchestrator.journal.recovery import read_journal, readmit
from rlrun.orchestrator.journal.writer import Journal, SegmentWriter, rollout_fingerprint
from rlrun.orchestrator.progress.metrics_file import MetricsFile, write_trace
from rlrun.orchestrator.progress.step_metrics import (
    OwnMetrics,
    batch_metrics,
    counter_metrics,
    group_means,
    group_metrics,
)
from rlrun.orchestrator.rollouts.chat_tokens import ChatTokens
from rlrun.orchestrator.rollouts.dispatcher import Dispatcher
from rlrun.orchestrator.rollouts.environment_pool import Arena
from rlrun.orchestrator.rollouts.player import Player
from rlrun.orchestrator.staleness import is_fed, rebased
from rlrun.orchestrator.tasks.sampler import Sampler
from rlrun.orchestrator.trainer.client import TrainerClient, TrainerGoneError
from rlrun.orchestrator.types import FinishedGroup
from rlrun.protocol import exit_codes
from rlrun.protocol.attempts import Attempt
from rlrun.protocol.batch import Batch, BatchError, Dropped, write_batch
from rlrun.protocol.compute import stepwise
from rlrun.protocol.failures import RoleError
from rlrun.protocol.paths import RunPaths
from rlrun.protocol.storage import Volume


class BatchMaker:
    """Makes the batch of each step, in order. Owns where every group is: in flight, in the buffer, in a batch, or given up.

    Args:
        config: the role's configuration.
        attempt: the attempt's file.
        base: where the attempt starts.
        arenas: the environments.
        player: plays episodes.
        chat: tokenizer and template.
        pool: the engines.
        sync: tells the newest published version.
        trainer: takes the batches.
        metrics: of each batch.
        courtesy: writes the traces.
        signal: notified after each change.
        volume: that the run's folder is on.

    Raises:
        RoleError: the recording cannot be read.
    """

    def __init__(
        self,
        config: OrchestratorConfig,
        attempt: Attempt,
        base: Snapshot,
        *,
        arenas: Sequence[Arena],
        player: Player,
        chat: ChatTokens,
        pool: EnginePool,
        sync: WeightSync,
        trainer: TrainerClient,
        metrics: MetricsFile,
        courtesy: Courtesy,
        signal: Signal,
        volume: Volume,
    ) -> None:
        self.config, self.attempt = config, attempt
        self._arenas, self._pool, self._sync, self._trainer = arenas, pool, sync, trainer
        self._metrics, self._courtesy, self._signal, self._volume = metrics, courtesy, signal, volume
        self._paths = RunPaths(Path(config.output_dir))
        self.made = attempt.base_step
        """The last step whose batch is made."""
        self.snapshots: dict[int, Snapshot] = {}
        """The orchestrator when the batch of each step was made, until that step is saved."""
        self.ledger = Ledger.restore(base.ledger)
        self._counted = dict(base.ledger.counters)
        self._own_metrics = OwnMetrics()
        self._buffer: list[FinishedGroup] = []
        self.recording = (
            Recording(Path(config.replay), range(attempt.base_step + 1, config.max_steps + 1))
            if config.replay
            else None
        )
        """Batches that are taken from there instead."""
        self._sampler = Sampler.of(config, [len(arena.tasks) for arena in arenas])
        if not self._sampler.restore(base.sampler, step=base.step, next_group=base.ledger.next_group):
            logger.warning("environments or curricula have changed since the checkpoint: the pools start empty")
        self._fingerprint = rollout_fingerprint(config)
        self._journal: Journal | None = None
        if config.checkpoint.enabled and self.recording is None:
            writer = SegmentWriter(self._paths, attempt=attempt.attempt, fingerprint=self._fingerprint)
            self._journal = Journal(writer, volume)
        self.turns: GPUTurns | None = None
        """Gives the trainer the engines' GPUs, where they have the same; set before `run`."""
        self._rules = rules_of(config, vocabulary=chat.vocabulary)
        self.dispatcher = Dispatcher(
            config,
            arenas,
            player,
            pool,
            chat,
            sampler=self._sampler,
            ledger=self.ledger,
            rules=self._rules,
            accepted=self.accepted,
            finished=self._buffer_group,
            next_step=lambda: self.made + 1,
            signal=signal,
            journal=self._journal,
        )

    @property
    def buffered(self) -> int:
        """Rollouts that are finished and in no batch."""
        return sum(len(group.rollouts) for group in self._buffer)

    def accepted(self) -> int:
        """Rollouts in batches or in the buffer, see `staleness.capacity`."""
        return rebased(self.made, self.config.batch_size) + self.buffered

    async def close(self) -> None:
        """Write what is left of the journal."""
        if self._journal is not None:
            await self._journal.close()

    async def collect(self) -> None:
        """Delete of the journal what the newest complete checkpoint covers."""
        if self._journal is None:
            return
        covering = await in_thread(partial(state.newest_complete, self._paths, self.attempt))
        if covering is not None:
            await self._journal.collect(covering.ledger.settled())

    async def run(self) -> None:
        """Up to the last step's batch.

        Raises:
            RoleError: why the run cannot go on; possibly inside an exception group.
        """
        try:
            await self._make_all()
        except* TrainerGoneError:
            pass  # told to stop, the trainer ended before this task was cancelled

    async def _make_all(self) -> None:
        await self._signal.until(lambda: self._sync.newest is not None)  # before, the trainer takes no batch
        if self.recording is not None:
            await self._replay(self.recording)
            return
        await self._readmit_batches()
        await self._readmit_rollouts()
        async with asyncio.TaskGroup() as tasks:
            dispatching = tasks.create_task(self.dispatcher.run())
            while self.made < self.config.max_steps:
                await self._signal.until(lambda: self._next_groups() is not None)
                groups = self._next_groups()
                assert groups is not None
                await self._make(groups)
            dispatching.cancel()

    # ---- of finished groups

    def _buffer_group(self, group: FinishedGroup) -> None:
        self._buffer.append(group)

    def _next_groups(self) -> list[FinishedGroup] | None:
        step, limit = self.made + 1, self.config.algorithm.max_off_policy_steps
        if self.dispatcher.waits_for(step) or not self._may_make(step):
            return None
        usable, _ = split_by_age(self._buffer, step=step, max_off_policy_steps=limit)
        return choose_first(usable, self.config.batch_size, step=step, max_off_policy_steps=limit)

    def _may_make(self, step: int) -> bool:
        """Without surplus the dispatcher's bound alone keeps batches from running ahead; with it there may be enough for one more."""
        newest, depth = self._sync.newest, self.config.algorithm.max_async_level
        return not self.config.surplus or (newest is not None and is_fed(step, version=newest, max_async_level=depth))

    async def _make(self, groups: list[FinishedGroup]) -> None:
        began, step = time.monotonic(), self.made + 1
        chosen = {group.number for group in groups}
        self._buffer = [group for group in self._buffer if group.number not in chosen]
        self.ledger.accept(group.number for group in groups)
        tasks = tuple((group.number, self._sampler.draw(group.number).task) for group in groups)
        self._sampler.accept(step, {group.number: group.mean_reward for group in groups})
        self._take_step(step)
        self.dispatcher.cancel_surplus()
        self._expire(step + 1)
        dropped = self.dispatcher.take_dropped()
        batch = await in_thread(partial(self._assemble, groups, step, dropped, tasks))
        await self._write(batch)
        trace = self._paths.trace(step)
        self._courtesy.write(f"traces/{trace.name}", partial(write_trace, trace, batch, groups))
        counters = dict(self.ledger.counters)
        metrics = await in_thread(lambda: self._measured(batch, groups))
        metrics |= counter_metrics(counters, self._counted)
        metrics |= {
            f"environment/{a.config.label}/{k}": v for a in self._arenas for k, v in a.environment.metrics().items()
        }
        metrics["rollouts/in_flight"] = float(self.dispatcher.running)
        metrics["time/make_batch"] = time.monotonic() - began
        metrics["time/update_weights"] = self._sync.seconds
        metrics |= self._pool.metrics()
        metrics |= self._sampler.metrics()
        self._counted = counters
        await self._announce(batch, metrics)

    def _measured(self, batch: Batch, groups: Sequence[FinishedGroup]) -> dict[str, float]:
        """What takes a look at each token."""
        return (
            self._batch_metrics(batch) | group_metrics(groups, self._own_metrics) | filter_metrics(groups, self._rules)
        )

    def _batch_metrics(self, batch: Batch) -> dict[str, float]:
        return batch_metrics(batch, solved_rewards(self.config.environments))

    def _take_step(self, step: int) -> None:
        self.made = step
        self.snapshots[step] = Snapshot(step, self.ledger.state(), sampler=self._sampler.state())
        self._signal.notify()

    def _expire(self, step: int) -> None:
        """Give up what no batch from `step` on may hold."""
        limit = self.config.algorithm.max_off_policy_steps
        self._buffer, expired = split_by_age(self._buffer, step=step, max_off_policy_steps=limit)
        for group in expired:
            self.ledger.again(group.number, "age")
        self.dispatcher.cancel_too_old(step)

    def _assemble(
        self,
        groups: Sequence[FinishedGroup],
        step: int,
        dropped: tuple[Dropped, ...],
        tasks: tuple[tuple[int, int], ...],
    ) -> Batch:
        try:
            batch = assemble(groups, step=step, attempt=self.attempt.attempt, rules=self._rules)
        except ValueError as error:
            raise RoleError(f"algorithm.advantage: {error}", exit_codes.CONFIGURATION) from error
        return replace(batch, dropped=dropped, tasks=tasks)

    async def _write(self, batch: Batch) -> None:
        path = self._paths.batch(batch.step, self.attempt.attempt)
        try:
            await insist(self._volume, f"write the batch of step {batch.step}", partial(write_batch, path, batch))
        except BatchError as error:
            raise RoleError(str(error), exit_codes.DATA) from error

    async def _announce(self, batch: Batch, metrics: dict[str, float]) -> None:
        if self.turns is not None:
            await self.turns.to_trainer(batch.step)
            metrics = metrics | {"time/engines_asleep": self.turns.seconds}
        self._metrics.add(batch.step, "batch", metrics)
        await self._trainer.batch_ready(batch.step, str(self._paths.batch(batch.step, self.attempt.attempt)))

    # ---- of what earlier attempts left

    async def _readmit_batches(self) -> None:
        """Batches that an earlier attempt made for steps after the base, and that are fresh enough, are trained as they are."""
        found = state.readmissible(
            self._paths,
            self.attempt,
            self.ledger,
            max_off_policy_steps=self.config.algorithm.max_off_policy_steps,
        )
        while self.made < self.config.max_steps and (batch := await in_thread(lambda: next(found, None))) is not None:
            self._sampler.readmit(batch, group_means(batch))
            metrics = await in_thread(partial(self._batch_metrics, batch))
            rollouts = int(metrics["batch/rollouts"])
            self.ledger.counters["readmitted"] += rollouts
            self._counted["readmitted"] = self.ledger.counters["readmitted"]
            self._take_step(batch.step)
            await self._write(batch)
            metrics |= {"batch/readmitted": 1.0, "rollouts/readmitted": float(rollouts), "rollouts/discarded": 0.0}
            await self._announce(batch, metrics)

    async def _readmit_rollouts(self) -> None:
        """Finished rollouts of earlier attempts that are in no batch count again: to the buffer as if they had finished just now."""
        if self._journal is None:
            return
        settled = self.ledger.state().settled()
        found = await in_thread(
            partial(read_journal, self._paths, self.attempt, fingerprint=self._fingerprint, settled=settled)
        )
        steps = readmit(
            found,
            step=self.made + 1,
            max_off_policy_steps=self.config.algorithm.max_off_policy_steps,
            ledger=self.ledger,
            sampler=self._sampler,
            environments=[(arena.config.label, arena.config.group_size) for arena in self._arenas],
            finish=self.dispatcher.settle,
            drop=self.dispatcher.drop,
        )
        back = await stepwise(steps)
        self.dispatcher.readmit(back)
        self.ledger.counters["readmitted"] += back.rollouts
        self.ledger.counters.update({f"discarded/{reason}": count for reason, count in back.refused.items()})
        if back.rollouts or back.refused:
            logger.info(f"journal: {back}")
        self._signal.notify()

    async def _replay(self, recording: Recording) -> None:
        depth = self.config.algorithm.max_async_level
        for step in range(self.made + 1, self.config.max_steps + 1):
            await self._until_published(step - 1 - depth)
            batch = await in_thread(partial(recording.batch, step, attempt=self.attempt.attempt))
            self._take_step(step)
            await self._write(batch)
            await self._announce(batch, await in_thread(partial(self._batch_metrics, batch)))

    async def _until_published(self, version: int) -> None:
        await self._signal.until(lambda: self._sync.newest is not None and self._sync.newest >= version)
