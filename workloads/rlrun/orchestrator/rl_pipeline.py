"""Data flow of an RL run, from published weights to the next batch and back. Each part has one owner:

    trainer --events--> Pipeline --publish--> WeightSync --update--> engines
                                                                       ^ tokens, log-probs, versions
    Dispatcher -> run_episode(environment, Conversation) --------------+
       ^    |
       |    v  finished rollouts, durable in journal/
    Groups: waiting -> in flight -> finished -> in a batch
                                        |
                                        v
    BatchProducer: choose -> assemble -> rollouts/step_N (durable) --batch_ready--> trainer
                   |
                   +-> Evaluations, metrics.jsonl, traces/, checkpoints/.../orchestrator/

Everything runs in one event loop, so state changes between two `await`s are atomic; files are written in threads.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from loguru import logger

from rlrun.config.models.roles import OrchestratorConfig
from rlrun.orchestrator import checkpoint
from rlrun.orchestrator.aio.volume_access import BestEffortWriter, clean_up, in_thread
from rlrun.orchestrator.batches.assemble import Recording
from rlrun.orchestrator.batches.producer import BatchProducer, readmit_rollouts
from rlrun.orchestrator.checkpoint import PartWriter
from rlrun.orchestrator.engines.draining import Drain
from rlrun.orchestrator.engines.load_meter import LoadMeter
from rlrun.orchestrator.engines.weight_sync import GPUTurns, WeightSync
from rlrun.orchestrator.evaluation.evaluation_schedule import Evaluations
from rlrun.orchestrator.evaluation.evaluator import Evaluator, is_due
from rlrun.orchestrator.groups.groups import Groups
from rlrun.orchestrator.journal.journal_writer import Journal, SegmentWriter, rollout_fingerprint
from rlrun.orchestrator.progress.exposition import Measures
from rlrun.orchestrator.progress.metrics_file import MetricsFile, delete_old_traces
from rlrun.orchestrator.progress.progress_server import Progress
from rlrun.orchestrator.progress.run_snapshot import EngineReports, Standing
from rlrun.orchestrator.rollouts.context import RunContext
from rlrun.orchestrator.rollouts.dispatcher import Dispatcher
from rlrun.orchestrator.rollouts.player import Player
from rlrun.orchestrator.trainer.trainer_client import TrainerGoneError
from rlrun.protocol.files.attempts import Attempt
from rlrun.protocol.files.failures import RoleError
from rlrun.protocol.messages.trainer_channel import Event


class Pipeline:
    """Data flow of one attempt, from the trainer's first event to the end.

    Args:
        context: context of the attempt.

    Raises:
        RoleError: the base checkpoint or the recording is unreadable.
    """

    def __init__(self, context: RunContext) -> None:
        config, attempt, pool = context.config, context.attempt, context.pool
        self.config, self.attempt, self.trainer = config, attempt, context.trainer
        self._context, self._pool, self._signal, self._paths = context, pool, context.signal, context.paths
        self._writer = BestEffortWriter()
        self._parts = PartWriter(context.volume, self.trainer.checkpoint_saved)
        # All other parts continue from the base. It is read first, so that an unreadable checkpoint
        # ends the attempt before a file of the run is changed.
        base = checkpoint.base_snapshot(self._paths, attempt)
        self._tasks = {
            arena.config.label: checkpoint.TaskSet(size=len(arena.tasks), digest=arena.digest)
            for arena in context.arenas
        }
        self._changed = checkpoint.report_changed_tasks(base, self._tasks)
        if self._changed:  # the curriculum's pools contain positions of tasks, which now are other tasks
            base = replace(base, sampler={})
        self._metrics = self._open_metrics(base)
        self._sync = WeightSync(
            pool,
            self._signal,
            timeout_seconds=config.weight_sync.timeout_seconds,
            sender=config.trainer_url if config.weight_sync.transport == "NCCL" else None,
        )
        player = Player(config, pool, context.chat)
        evaluator = Evaluator(config, context.arenas, player, pool, context.chat)
        self._evaluations = Evaluations(context, evaluator, sync=self._sync, metrics=self._metrics, writer=self._writer)
        self._recording = _open_recording(config, attempt)
        # A replay makes no rollouts, so it has nothing to keep.
        self._journal = _open_journal(context) if self._recording is None else None
        # The state of tasks and groups at the base step. Finished rollouts of earlier attempts are
        # added later, when the engines hold weights (`_make_batches`).
        self._groups = Groups.restore(
            context.config,
            base,
            made=context.attempt.base_step,
            tasks=[len(arena.tasks) for arena in context.arenas],
            vocabulary=context.chat.vocabulary,
            journal=self._journal,
            signal=context.signal,
        )
        self._dispatcher = Dispatcher(context, self._groups, player)
        self._turns, engine_requests = self._gpu_turns(), context.engine_requests
        self._meter = LoadMeter(pool, ahead=self._dispatcher.ahead, window=lambda: engine_requests.window_seconds)
        self._drain = Drain(
            pool, self._signal, wanted=lambda: engine_requests.engines, spot=lambda: engine_requests.spot
        )
        self._producer = BatchProducer(
            context, self._groups, sync=self._sync, metrics=self._metrics, writer=self._writer, turns=self._turns
        )
        engines = EngineReports(self._sync, self._meter, self._drain)
        self._standing = Standing(
            context, self._groups, evaluations=self._evaluations, engines=engines, metrics=self._metrics
        )
        self._finished = False
        # The last checkpoint has to be complete before the run may end; the base is complete.
        self._complete = attempt.base_step >= config.max_steps or not config.checkpoint.enabled

    def _open_metrics(self, base: checkpoint.Snapshot) -> MetricsFile:
        """Open the file of metrics after the base checkpoint, and start the deletion of old traces."""
        step = self.attempt.base_step
        metrics = MetricsFile(
            self._paths.metrics,
            attempt=self.attempt.attempt,
            base_step=step,
            unwritten=base.unwritten,
            evaluated=self._is_due,
            writer=self._writer,
        )
        old = partial(delete_old_traces, self._paths, newest=step, keep=self.config.keep_traces)
        self._writer.write("the deletion of old traces", old)
        return metrics

    def _gpu_turns(self) -> GPUTurns | None:
        if not self.config.colocated:
            return None
        timeout = self.config.weight_sync.timeout_seconds
        return GPUTurns(self._pool, self._sync, self._signal, timeout_seconds=timeout, quiet=self._is_quiet)

    async def run(self) -> bool:
        """Run until the last checkpoint and the last evaluation are complete, or until `stop`.

        Returns:
            Whether all work is done.

        Raises:
            RoleError: the run cannot continue; possibly inside an exception group.
        """
        try:
            await self._run_tasks()
        finally:
            # Also after an error: finished rollouts in the queue become durable and are used by the
            # next attempt.
            if self._journal is not None:
                await self._journal.close()
            await in_thread(self._writer.close)
        if self._is_done():
            logger.info("all steps are trained and saved")
        return self._is_done()

    # The trainer's events and the checkpoint writer outlive the other tasks: after a stop they complete the last checkpoint.
    async def _run_tasks(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            following, saving = tasks.create_task(self._follow_trainer()), tasks.create_task(self._parts.run())
            parts = (self._evaluations, self._meter, self._drain)
            background = [tasks.create_task(part.run()) for part in parts]
            if self._recording is None or self.config.evaluation is not None:
                background.append(tasks.create_task(self._sync.run()))
            background.append(tasks.create_task(self._make_batches()))
            await self._signal.until(lambda: self._is_done() or self.trainer.ending)
            # Makers of rollouts end first at a stop. Their work would only compete with the last
            # checkpoint for the grace period.
            for task in background:
                task.cancel()
            if self.trainer.ending:
                await self.trainer.stop_and_wait(following, self.config.checkpoint.grace_period_seconds)
            following.cancel()
            saving.cancel()

    async def _make_batches(self) -> None:
        try:
            await self._signal.until(lambda: self._sync.newest is not None)  # the trainer takes no batch earlier
            if self._recording is not None:
                await self._producer.replay(self._recording)
                return
            # Durable batches first: their groups leave the journal, so no rollout counts twice.
            await self._producer.readmit_batches()
            if self._journal is not None:
                await readmit_rollouts(self._context, self._groups, self._changed)
            async with asyncio.TaskGroup() as tasks:
                dispatching = tasks.create_task(self._dispatcher.run())
                await self._producer.run()
                dispatching.cancel()
        except* TrainerGoneError:
            pass  # after a stop request the trainer may end before this task is cancelled

    def stop(self) -> None:
        """Stop making rollouts and batches; only let the trainer, which also stops, complete its last checkpoint."""
        self.trainer.ending = True
        self._signal.notify()

    def progress(self) -> Progress:
        """Return the current progress of the run."""
        return self._standing.progress()

    def measures(self) -> Measures:
        """Return the values for the metrics in addition to the progress."""
        return self._standing.measures()

    def _is_due(self, version: int) -> bool:
        return is_due(version, self.config.evaluation, max_steps=self.config.max_steps)

    def _is_done(self) -> bool:
        return self._finished and self._complete and not self._evaluations.pending and not self._metrics.pending()

    # ---- events of the trainer

    async def _follow_trainer(self) -> None:
        with suppress(TrainerGoneError):
            async for event in self.trainer.events():
                await self._handle_event(event)
                self._signal.notify()

    async def _handle_event(self, event: Event) -> None:
        match event.kind:
            case "published":
                if event.path is None and self.config.weight_sync.transport == "Filesystem":
                    raise RoleError(f"the trainer published version {event.step} without a folder")
                # Engines that share the trainer's GPUs cannot load weights before it has freed its
                # memory; the event `released` follows.
                if self._turns is None:
                    self._offer_version(event.step, event.path)
                else:
                    self._turns.published(event.step, event.path)
            case "released":
                if self._turns is not None:
                    self._offer_version(event.step, self._turns.released(event.step))
            case "trained":
                self._standing.trained(event.step, event.metrics)
                self._meter.trained(event.metrics)
                self._metrics.add(event.step, "trained", event.metrics)
                await self._drop_trained_steps(event.step)
            case "checkpoint_saved":
                self._save_snapshot(event)
            case "checkpoint_complete":
                self._standing.saved(event.step)
                if not self.config.record_rollouts:
                    covered = partial(checkpoint.remove_covered_batches, self._paths, self.attempt)
                    await clean_up("delete covered batches", covered)
                await self._delete_covered_journal()
                # Only now: this can end the run, which cancels the deletions above.
                self._complete = self._complete or event.step >= self.config.max_steps
            case "finished":
                self._finished = True

    def _offer_version(self, version: int, path: str | None) -> None:
        """Publish a version to the engines, and hold it if an evaluation needs it."""
        wanted = self._metrics.wants_base if version == self.attempt.base_step else self._is_due(version)
        # No `await` before `publish`: an evaluation that is wanted always finds its version held,
        # and no engine can skip to a newer one in between.
        if wanted:
            self._evaluations.want(version)
        self._sync.publish(version, path, hold=wanted)

    def _is_quiet(self) -> bool:
        """Return whether no engine has a request or will get one before the next version."""
        return not self._pool.in_flight and not self._groups.running and not self._evaluations.pending

    def _save_snapshot(self, event: Event) -> None:
        snapshots = self._groups.snapshots
        snapshot = snapshots.get(event.step)
        if snapshot is None or event.path is None:
            logger.error(
                f"the checkpoint of step {event.step} stays incomplete: the orchestrator has no snapshot of it"
            )
            return
        whole = replace(snapshot, unwritten=self._metrics.unwritten(event.step), tasks=self._tasks)
        self._parts.put(event.step, partial(checkpoint.write_snapshot, Path(event.path), whole))
        # The trainer saves steps in order, so older snapshots are never requested again.
        for step in [step for step in snapshots if step <= event.step]:
            del snapshots[step]

    async def _delete_covered_journal(self) -> None:
        """Delete the journal files that the newest complete checkpoint covers."""
        if self._journal is None:
            return
        # Read from the volume and not from memory: only groups that a durable checkpoint contains
        # may leave the journal.
        newest = partial(checkpoint.newest_complete, self._paths, self.attempt)
        covering = await clean_up("delete covered files of the journal", newest)
        if covering is not None:
            await self._journal.collect(covering.ledger.settled())

    async def _drop_trained_steps(self, step: int) -> None:
        """Drop snapshots and batches of trained steps if the run makes no checkpoints, because no attempt can need
        them.
        """
        if self.config.checkpoint.enabled:
            return
        snapshots = self._groups.snapshots
        for old in [number for number in snapshots if number <= step]:
            del snapshots[old]
        if not self.config.record_rollouts:
            await clean_up("delete trained batches", partial(checkpoint.remove_batches, self._paths, through=step))


def _open_recording(config: OrchestratorConfig, attempt: Attempt) -> Recording | None:
    """Open the batches that replace new rollouts, or return None without `replay`.

    Raises:
        RoleError: a required batch is missing.
    """
    if not config.replay:
        return None
    return Recording(Path(config.replay), range(attempt.base_step + 1, config.max_steps + 1))


def _open_journal(context: RunContext) -> Journal | None:
    """Open the journal, or return None if no restart could use it."""
    if not context.config.checkpoint.enabled:
        return None
    fingerprint = rollout_fingerprint(context.config)
    writer = SegmentWriter(context.paths, attempt=context.attempt.attempt, fingerprint=fingerprint)
    return Journal(writer, context.volume)
