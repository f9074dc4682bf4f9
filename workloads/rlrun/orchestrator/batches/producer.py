"""Production of batches: choose finished groups, write the batch, announce it to the trainer.

After a restart, the batches and rollouts of earlier attempts come first.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial

from loguru import logger

from rlrun.config.models.rollout import solved_rewards
from rlrun.orchestrator import checkpoint
from rlrun.orchestrator.aio.volume_access import BestEffortWriter, in_thread, retry_until_done
from rlrun.orchestrator.batches.assemble import Recording, assemble_batch, choose_first
from rlrun.orchestrator.engines.weight_sync import GPUTurns, WeightSync
from rlrun.orchestrator.groups.filters import filter_metrics
from rlrun.orchestrator.groups.groups import Batched, Groups
from rlrun.orchestrator.journal.journal_writer import rollout_fingerprint
from rlrun.orchestrator.journal.recovery import read_journal, readmit_entries
from rlrun.orchestrator.progress.metrics_file import MetricsFile, is_trace_old, write_trace
from rlrun.orchestrator.progress.step_metrics import (
    OwnMetrics,
    batch_metrics,
    counter_metrics,
    group_means,
    group_metrics,
)
from rlrun.orchestrator.rollouts.context import RunContext
from rlrun.orchestrator.staleness import split_by_age, too_old
from rlrun.orchestrator.types import FinishedGroup
from rlrun.protocol.files.batch import Batch, BatchError, write_batch
from rlrun.protocol.files.failures import RoleError
from rlrun.runtime import exit_codes
from rlrun.runtime.background_compute import run_stepwise


class BatchProducer:
    """Producer of each step's batch, in order.

    Args:
        context: context of the attempt.
        groups: state of all groups.
        sync: weight hand-over, which has the newest published version.
        metrics: file for the metrics of each batch.
        writer: writer of the traces.
        turns: hand-over of the engines' GPUs to the trainer. None: the trainer has its own GPUs.
    """

    def __init__(
        self,
        context: RunContext,
        groups: Groups,
        *,
        sync: WeightSync,
        metrics: MetricsFile,
        writer: BestEffortWriter,
        turns: GPUTurns | None,
    ) -> None:
        self.config, self.attempt = context.config, context.attempt
        self._context, self._groups, self._signal, self._paths = context, groups, context.signal, context.paths
        self._sync, self._metrics, self._writer, self._turns = sync, metrics, writer, turns
        self._counted = dict(groups.ledger.counters)
        self._own_metrics = OwnMetrics()

    async def run(self) -> None:
        """Make batches up to the last step.

        Raises:
            RoleError: the run cannot continue.
        """
        while self._groups.made < self.config.max_steps:
            await self._signal.until(lambda: self._next_groups() is not None)
            groups = self._next_groups()
            assert groups is not None
            await self._make_batch(groups)

    def _write_trace(self, batch: Batch, groups: Sequence[FinishedGroup]) -> None:
        write_trace(self._paths.trace(batch.step), batch, groups)
        old, keep = batch.step - self.config.keep_traces, self.config.keep_traces
        if is_trace_old(old, newest=batch.step, keep=keep):
            self._paths.trace(old).unlink(missing_ok=True)

    def _next_groups(self) -> list[FinishedGroup] | None:
        step, limit = self._groups.made + 1, self.config.algorithm.max_off_policy_steps
        if self._groups.waits_for(step) or not self._may_make():
            return None
        usable, _ = split_by_age(self._groups.finished, step=step, max_off_policy_steps=limit)
        return choose_first(usable, self.config.batch_size, step=step, max_off_policy_steps=limit)

    def _may_make(self) -> bool:
        """Return whether the next batch stays within the allowed depth.

        Without surplus the dispatcher's limit ensures it. With surplus the finished groups may suffice for one more
        batch.
        """
        newest = self._sync.newest
        return not self.config.surplus or (newest is not None and self._groups.feeds(newest))

    async def _make_batch(self, groups: list[FinishedGroup]) -> None:
        began = time.monotonic()
        # Before the first `await`: ledger, sampler and the step's snapshot change together, so that
        # a checkpoint never contains half of the change.
        batched = self._groups.batch(groups)
        batch = await in_thread(partial(self._assemble_batch, groups, batched))
        # Durable before the trainer is notified. After a kill the next attempt trains the same
        # batch, and its rollouts are not sampled again.
        await self._write_batch(batch)
        trace = self._paths.trace(batch.step)
        self._writer.write(f"traces/{trace.name}", partial(self._write_trace, batch, groups))
        # Copied before the next `await`: rollouts that finish during it belong to the metrics of
        # the next step.
        counters = dict(self._groups.ledger.counters)
        metrics = await in_thread(lambda: self._token_metrics(batch, groups))
        metrics |= counter_metrics(counters, self._counted)
        for arena in self._context.arenas:
            own = arena.environment.metrics()
            metrics |= {f"environment/{arena.config.label}/{name}": value for name, value in own.items()}
        metrics["rollouts/in_flight"] = float(self._groups.running)
        metrics["time/make_batch"] = time.monotonic() - began
        metrics["time/update_weights"] = self._sync.seconds
        metrics |= self._context.pool.metrics()
        metrics |= self._groups.sampler.metrics()
        self._counted = counters
        await self._announce_batch(batch, metrics)

    def _token_metrics(self, batch: Batch, groups: Sequence[FinishedGroup]) -> dict[str, float]:
        """Compute the metrics that need all tokens."""
        own = group_metrics(groups, self._own_metrics)
        return self._batch_metrics(batch) | own | filter_metrics(groups, self._groups.rules)

    def _batch_metrics(self, batch: Batch) -> dict[str, float]:
        return batch_metrics(batch, solved_rewards(self.config.environments))

    def _assemble_batch(self, groups: Sequence[FinishedGroup], batched: Batched) -> Batch:
        try:
            batch = assemble_batch(groups, step=batched.step, attempt=self.attempt.attempt, rules=self._groups.rules)
        except ValueError as error:
            raise RoleError(f"algorithm.advantage: {error}", exit_codes.CONFIGURATION) from error
        return replace(batch, dropped=batched.dropped, tasks=batched.tasks)

    async def _write_batch(self, batch: Batch) -> None:
        path, volume = self._paths.batch(batch.step, self.attempt.attempt), self._context.volume
        try:
            await retry_until_done(volume, f"write the batch of step {batch.step}", partial(write_batch, path, batch))
        except BatchError as error:
            raise RoleError(str(error), exit_codes.DATA) from error

    async def _announce_batch(self, batch: Batch, metrics: dict[str, float]) -> None:
        if self._turns is not None:
            # The trainer moves its model to the GPU when it takes the batch, so the engines have to
            # sleep before.
            await self._turns.to_trainer(batch.step)
            metrics = metrics | {"time/engines_asleep": self._turns.seconds}
        self._metrics.add(batch.step, "batch", metrics)
        path = self._paths.batch(batch.step, self.attempt.attempt)
        await self._context.trainer.batch_ready(batch.step, str(path))

    # ---- work of earlier attempts

    async def readmit_batches(self) -> None:
        """Train the batches of earlier attempts for the steps after the base unchanged, if they are fresh enough."""
        ledger = self._groups.ledger
        found = checkpoint.readmissible_batches(
            self._paths,
            self.attempt,
            ledger,
            max_off_policy_steps=self.config.algorithm.max_off_policy_steps,
        )
        while (
            self._groups.made < self.config.max_steps
            and (batch := await in_thread(lambda: next(found, None))) is not None
        ):
            # In the order of the steps, like the killed attempt: the outcomes of one batch decide
            # the draws after it.
            self._groups.sampler.readmit(batch, group_means(batch))
            metrics = await in_thread(partial(self._batch_metrics, batch))
            rollouts = int(metrics["batch/rollouts"])
            # Counted separately from new rollouts, so that throughput and cost are not inflated by a
            # restart.
            ledger.counters["readmitted"] += rollouts
            self._counted["readmitted"] = ledger.counters["readmitted"]
            self._groups.advance(batch.step)
            # Written again under this attempt's number, because the trainer refuses batches of
            # other attempts.
            await self._write_batch(batch)
            metrics |= {"batch/readmitted": 1.0, "rollouts/readmitted": float(rollouts), "rollouts/discarded": 0.0}
            await self._announce_batch(batch, metrics)

    async def replay(self, recording: Recording) -> None:
        """Train on the recorded batches, each as soon as the pipeline's depth allows."""
        depth = self.config.algorithm.max_async_level
        for step in range(self._groups.made + 1, self.config.max_steps + 1):
            await self._until_published(step - 1 - depth)
            batch = await in_thread(partial(recording.batch, step, attempt=self.attempt.attempt))
            self._groups.advance(step)
            await self._write_batch(batch)
            await self._announce_batch(batch, await in_thread(partial(self._batch_metrics, batch)))

    async def _until_published(self, version: int) -> None:
        await self._signal.until(lambda: self._sync.newest is not None and self._sync.newest >= version)


async def readmit_rollouts(context: RunContext, groups: Groups, changed: Collection[str] = ()) -> None:
    """Readmit finished rollouts of earlier attempts that are in no batch, as if they had finished now.

    Args:
        context: context of the attempt.
        groups: groups of the attempt.
        changed: labels of environments with changed tasks. Their rollouts are dropped, because a group would mix
            rollouts of two tasks.
    """
    ledger = groups.ledger
    found = await in_thread(
        partial(
            read_journal,
            context.paths,
            context.attempt,
            fingerprint=rollout_fingerprint(context.config),
            settled=ledger.state().settled(),
        )
    )
    comparing = {arena.config.label for arena in context.arenas if arena.environment.compares}
    steps = readmit_entries(
        found,
        is_old=partial(
            too_old, step=groups.made + 1, max_off_policy_steps=context.config.algorithm.max_off_policy_steps
        ),
        ledger=ledger,
        sampler=groups.sampler,
        environments=[(arena.config.label, arena.config.group_size) for arena in context.arenas],
        finish=lambda group: groups.readmit(group, compared=group.environment in comparing),
        drop=groups.drop,
        changed=changed,
    )
    back = await run_stepwise(steps)
    groups.resume(back)
    ledger.counters["readmitted"] += back.rollouts
    ledger.counters.update({f"discarded/{reason}": count for reason, count in back.refused.items()})
    if back.rollouts or back.refused:
        logger.info(f"journal: {back}")
    context.signal.notify()
