"""The run's data flow, from published weights to the next batch and back. Each part has one owner:

    trainer --events--> Pipeline --publish--> WeightSync --update--> engines
                                                                       ^ tokens, log-probs, versions
    Sampler -> Dispatcher -> run_episode(environment, Conversation) ---+
                   |
                   v  finished groups, durable in journal/
    BatchMaker: buffer -> choose -> assemble -> rollouts/step_N (durable) --batch_ready--> trainer
                   |
                   +-> Evaluations, metrics.jsonl, traces/, checkpoints/.../orchestrator/

Everything runs in one event loop, so state changes between two `await`s are atomic; files are written in threads.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from loguru import logger

from rlrun.config.roles import OrchestratorConfig
from rlrun.orchestrator.aio.best_effort_writer import Courtesy
from rlrun.orchestrator.aio.condition import Signal
from rlrun.orchestrator.aio.volume import in_thread
from rlrun.orchestrator.batches.producer import BatchMaker
from rlrun.orchestrator.checkpoint import state
from rlrun.orchestrator.checkpoint.writer import PartWriter
from rlrun.orchestrator.engines.gpu_turns import GPUTurns
from rlrun.orchestrator.engines.pool import EnginePool
from rlrun.orchestrator.engines.weight_sync import WeightSync
from rlrun.orchestrator.evaluation.evaluator import Evaluator, due
from rlrun.orchestrator.evaluation.schedule import Evaluations
from rlrun.orchestrator.progress.metrics_file import MetricsFile
from rlrun.orchestrator.progress.server import Progress
from rlrun.orchestrator.progress.snapshot import Standing
from rlrun.orchestrator.rollouts.chat_tokens import ChatTokens
from rlrun.orchestrator.rollouts.environment_pool import Arena
from rlrun.orchestrator.rollouts.player import Player
from rlrun.orchestrator.trainer.client import TrainerClient, TrainerGoneError
from rlrun.protocol.attempts import Attempt
from rlrun.protocol.channel import Event
from rlrun.protocol.failures import RoleError
from rlrun.protocol.paths import RunPaths
from rlrun.protocol.storage import Volume


class Pipeline:
    """One attempt of one run, from the trainer's first event to the end.

    Args:
        config: the role's configuration.
        attempt: the attempt's file.
        arenas: the environments.
        chat: tokenizer and template.
        pool: the engines.
        trainer: the channel to the trainer, which is up.
        signal: the one that `pool` notifies.
        volume: that the run's folder is on. What the run cannot go on without waits while it refuses.

    Raises:
        RoleError: the base checkpoint or the recording cannot be read.
    """

    def __init__(
        self,
        config: OrchestratorConfig,
        attempt: Attempt,
        *,
        arenas: Sequence[Arena],
        chat: ChatTokens,
        pool: EnginePool,
        trainer: TrainerClient,
        signal: Signal,
        volume: Volume,
    ) -> None:
        self.config, self.attempt, self.trainer = config, attempt, trainer
        self._signal, self._courtesy = signal, Courtesy()
        self._parts = PartWriter(volume, trainer.checkpoint_saved)
        self._paths = RunPaths(Path(config.output_dir))
        base = state.base_snapshot(self._paths, attempt)
        self._metrics = MetricsFile(
            self._paths.metrics,
            attempt=attempt.attempt,
            base_step=attempt.base_step,
            unwritten=base.unwritten,
            evaluated=self._due,
            courtesy=self._courtesy,
        )
        self._sync = WeightSync(
            pool,
            signal,
            timeout_seconds=config.weight_sync.timeout_seconds,
            sender=config.trainer_url if config.weight_sync.transport == "NCCL" else None,
        )
        player = Player(config, pool, chat)
        self._evaluations = Evaluations(
            Evaluator(config, arenas, player, pool, chat),
            paths=self._paths,
            pool=pool,
            sync=self._sync,
            metrics=self._metrics,
            courtesy=self._courtesy,
            signal=signal,
        )
        self._maker = BatchMaker(
            config,
            attempt,
            base,
            arenas=arenas,
            player=player,
            chat=chat,
            pool=pool,
            sync=self._sync,
            trainer=trainer,
            metrics=self._metrics,
            courtesy=self._courtesy,
            signal=signal,
            volume=volume,
        )
        self._pool = pool
        self._turns = (
            GPUTurns(pool, self._sync, signal, timeout_seconds=config.weight_sync.timeout_seconds, quiet=self._quiet)
            if config.colocated
            else None
        )
        self._maker.turns = self._turns
        self._standing = Standing(
            config,
            attempt,
            maker=self._maker,
            evaluations=self._evaluations,
            pool=pool,
            sync=self._sync,
            trainer=trainer,
            metrics=self._metrics,
            volume=volume,
        )
        self._finished = False
        self._complete = attempt.base_step >= config.max_steps or not config.checkpoint.enabled

    async def run(self) -> bool:
        """Everything up to the last checkpoint and the last evaluation, or until `stop`.

        Returns:
            Whether all is done.

        Raises:
            RoleError: why the run cannot go on; possibly inside an exception group.
        """
        try:
            await self._run()
        finally:
            await self._maker.close()
            await in_thread(self._courtesy.close)
        if self._done():
            logger.info("all steps are trained and saved")
        return self._done()

    async def _run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            following, saving = tasks.create_task(self._follow_trainer()), tasks.create_task(self._parts.run())
            background = [tasks.create_task(self._evaluations.run())]
            if self._maker.recording is None or self.config.evaluation is not None:
                background.append(tasks.create_task(self._sync.run()))
            background.append(tasks.create_task(self._maker.run()))
            await self._signal.until(lambda: self._done() or self.trainer.ending)
            for task in background:
                task.cancel()
            if self.trainer.ending:
                await self.trainer.see_off(following, self.config.checkpoint.grace_period_seconds)
            following.cancel()
            saving.cancel()

    def stop(self) -> None:
        """Make no more rollouts and batches; only help the trainer, which is to stop too, to complete its last checkpoint."""
        self.trainer.ending = True
        self._signal.notify()

    def progress(self) -> Progress:
        """Current progress of the run."""
        return self._standing.progress()

    def _due(self, version: int) -> bool:
        return due(version, self.config.evaluation, max_steps=self.config.max_steps)

    def _done(self) -> bool:
        return self._finished and self._complete and not self._evaluations.pending and not self._metrics.pending()

    # ---- news from the trainer

    async def _follow_trainer(self) -> None:
        with suppress(TrainerGoneError):
            async for event in self.trainer.events():
                await self._handle(event)
                self._signal.notify()

    async def _handle(self, event: Event) -> None:
        match event.kind:
            case "published":
                if event.path is None and self.config.weight_sync.transport == "Filesystem":
                    raise RoleError(f"the trainer published version {event.step} without a folder")
                if self._turns is None:
                    self._offer(event.step, event.path)
                else:
                    self._turns.published(event.step, event.path)
            case "released":
                if self._turns is not None:
                    self._offer(event.step, self._turns.released(event.step))
            case "trained":
                self._standing.trained(event.step)
                self._metrics.add(event.step, "trained", event.metrics)
                await self._forget(event.step)
            case "checkpoint_saved":
                self._save(event)
            case "checkpoint_complete":
                self._standing.saved(event.step)
                if not self.config.record_rollouts:
                    await in_thread(partial(state.remove_covered_batches, self._paths, self.attempt))
                await self._maker.collect()
                # Not before: from then on the run may be over, and what is under way here is cancelled.
                self._complete = self._complete or event.step >= self.config.max_steps
            case "finished":
                self._finished = True

    def _offer(self, version: int, path: str | None) -> None:
        """Let the engines have a version."""
        wanted = self._metrics.wants_base if version == self.attempt.base_step else self._due(version)
        if wanted:
            self._evaluations.want(version)
        self._sync.publish(version, path, hold=wanted)

    def _quiet(self) -> bool:
        """Whether no engine is asked for anything, nor will be before the next version."""
        asked = any(replica.load for replica in self._pool.replicas)
        return not asked and not self._maker.dispatcher.running and not self._evaluations.pending

    def _save(self, event: Event) -> None:
        snapshots = self._maker.snapshots
        snapshot = snapshots.get(event.step)
        if snapshot is None or event.path is None:
            logger.error(f"the checkpoint of step {event.step} stays incomplete: nothing is known of that step")
            return
        whole = replace(snapshot, unwritten=self._metrics.unwritten(event.step))
        self._parts.put(event.step, partial(state.write_snapshot, Path(event.path), whole))
        for step in [step for step in snapshots if step <= event.step]:
            del snapshots[step]

    async def _forget(self, step: int) -> None:
        """Without checkpoints nothing of a trained step is needed again."""
        if self.config.checkpoint.enabled:
            return
        snapshots = self._maker.snapshots
        for old in [number for number in snapshots if number <= step]:
            del snapshots[old]
        if not self.config.record_rollouts:
            await in_thread(partial(state.remove_batches, self._paths, through=step))
