"""The run's data flow, from published weights to the next batch and back. Each part has one owner:

    trainer --events--> Pipeline --publish--> WeightSync --update--> engines
                                                                       ^ tokens, log-probs, versions
    Sampler -> Dispatcher -> run_episode(environment, Conversation) ---+
                   |
                   v  finished groups, durable in journal/
               buffer -> choose -> assemble -> rollouts/step_N (durable) --batch_ready--> trainer
                   |
                   +-> Evaluator, metrics.jsonl, traces/, checkpoints/.../orchestrator/

Everything runs in one event loop, so state changes between two `await`s are atomic; files are written in threads.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from loguru import logger

from rlrun.config.roles import OrchestratorConfig
from rlrun.orchestrator import checkpoint
from rlrun.orchestrator.arenas import Arena
from rlrun.orchestrator.batcher import assemble, choose_first, split_by_age
from rlrun.orchestrator.checkpoint import Snapshot
from rlrun.orchestrator.dispatcher import Dispatcher, Player
from rlrun.orchestrator.engines import EnginePool
from rlrun.orchestrator.evaluation import HOLD_SECONDS, Evaluator, due, evaluation_metrics, trace_line
from rlrun.orchestrator.filters import filter_metrics, rules_of
from rlrun.orchestrator.journal import Journal, SegmentWriter, rollout_fingerprint
from rlrun.orchestrator.ledger import Ledger
from rlrun.orchestrator.metrics import batch_metrics, counter_metrics, discarded, group_means, group_metrics
from rlrun.orchestrator.progress import Progress, StepClock
from rlrun.orchestrator.records import MetricsFile, write_jsonl, write_trace
from rlrun.orchestrator.recovery import read_journal, readmit
from rlrun.orchestrator.replay import Recording
from rlrun.orchestrator.rollouts import FinishedGroup
from rlrun.orchestrator.sampler import Sampler
from rlrun.orchestrator.signals import Signal
from rlrun.orchestrator.staleness import rebased
from rlrun.orchestrator.tokens import ChatTokens
from rlrun.orchestrator.trainer_client import TrainerClient, TrainerGoneError
from rlrun.orchestrator.weights import WeightSync
from rlrun.protocol import exit_codes
from rlrun.protocol.attempts import Attempt
from rlrun.protocol.batch import Batch, BatchError, Dropped, write_batch
from rlrun.protocol.channel import Event
from rlrun.protocol.failures import RoleError, storage_errors
from rlrun.protocol.paths import RunPaths


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
    ) -> None:
        self.config, self.attempt, self.trainer = config, attempt, trainer
        self._paths = RunPaths(Path(config.output_dir))
        self._pool, self._signal, self._arenas = pool, signal, arenas
        base = checkpoint.base_snapshot(self._paths, attempt)
        self._ledger = Ledger.restore(base.ledger)
        self._counted = dict(base.ledger.counters)
        self._made = attempt.base_step
        """The last step whose batch is made."""
        self._trained = attempt.base_step
        self._buffer: list[FinishedGroup] = []
        self._snapshots: dict[int, Snapshot] = {}
        self._metrics = MetricsFile(
            self._paths.metrics,
            attempt=attempt.attempt,
            base_step=attempt.base_step,
            unwritten=base.unwritten,
            evaluated=self._due,
        )
        self._sync = WeightSync(pool, signal, timeout_seconds=config.weight_sync.timeout_seconds)
        player = Player(config, pool, chat)
        self._evaluator = Evaluator(config, arenas, player, pool, chat)
        self._evaluations: asyncio.Queue[int] = asyncio.Queue()
        self._evaluating = 0
        self._eval_rewards: dict[str, float] = {}
        self._recording = (
            Recording(Path(config.replay), range(attempt.base_step + 1, config.max_steps + 1))
            if config.replay
            else None
        )
        self._sampler = Sampler.of(config, [len(arena.tasks) for arena in arenas])
        if not self._sampler.restore(base.sampler, step=base.step, next_group=base.ledger.next_group):
            logger.warning("environments or curricula have changed since the checkpoint: the pools start empty")
        self._fingerprint = rollout_fingerprint(config)
        self._journal: Journal | None = None
        if config.checkpoint.enabled and self._recording is None:
            self._journal = Journal(SegmentWriter(self._paths, attempt=attempt.attempt, fingerprint=self._fingerprint))
        self._rules = rules_of(config, vocabulary=chat.vocabulary)
        self._dispatcher = Dispatcher(
            config,
            arenas,
            player,
            pool,
            chat,
            sampler=self._sampler,
            ledger=self._ledger,
            rules=self._rules,
            accepted=self._accepted,
            finished=self._finish_group,
            next_step=lambda: self._made + 1,
            signal=signal,
            journal=self._journal,
        )
        self._finished = False
        self._complete = attempt.base_step >= config.max_steps or not config.checkpoint.enabled
        self._resumed_from = attempt.base_step if attempt.base_attempt is not None else None
        self._checkpoint_step = self._resumed_from
        """Step of the newest complete checkpoint."""
        self._clock = StepClock()

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
            if self._journal is not None:
                await self._journal.close()
        if self._done():
            logger.info("all steps are trained and saved")
        return self._done()

    async def _run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            following = tasks.create_task(self._follow_trainer())
            background = [tasks.create_task(self._evaluate_all())]
            if self._recording is None or self.config.evaluation is not None:
                background.append(tasks.create_task(self._sync.run()))
            background.append(tasks.create_task(self._make_batches()))
            await self._signal.until(lambda: self._done() or self.trainer.ending)
            for task in background:
                task.cancel()
            if self.trainer.ending:
                await asyncio.wait([following], timeout=self.config.checkpoint.grace_period_seconds)
            following.cancel()

    def stop(self) -> None:
        """Make no more rollouts and batches; only help the trainer, which is told to stop too, to complete its last checkpoint."""
        self.trainer.ending = True
        self._signal.notify()

    # ---- what is where

    def _due(self, version: int) -> bool:
        return due(version, self.config.evaluation, max_steps=self.config.max_steps)

    def _accepted(self) -> int:
        buffered = sum(len(group.rollouts) for group in self._buffer)
        return rebased(self._made, self.config.batch_size) + buffered

    def _finish_group(self, group: FinishedGroup) -> None:
        self._buffer.append(group)

    def _done(self) -> bool:
        return self._finished and self._complete and not self._evaluating and not self._metrics.pending()

    # ---- news from the trainer

    async def _follow_trainer(self) -> None:
        with suppress(TrainerGoneError):
            async for event in self.trainer.events():
                await self._handle(event)
                self._signal.notify()

    async def _handle(self, event: Event) -> None:
        match event.kind:
            case "published":
                if event.path is None:
                    raise RoleError(f"the trainer published version {event.step} without a folder")
                wanted = self._metrics.wants_base if event.step == self.attempt.base_step else self._due(event.step)
                if wanted:
                    self._evaluating += 1
                    self._evaluations.put_nowait(event.step)
                self._sync.publish(event.step, event.path, hold=wanted)
            case "trained":
                self._trained = event.step
                self._clock.trained(event.step)
                self._metrics.add(event.step, "trained", event.metrics)
                await self._forget(event.step)
            case "checkpoint_saved":
                await self._save(event)
            case "checkpoint_complete":
                self._checkpoint_step = event.step
                if not self.config.record_rollouts:
                    await asyncio.to_thread(checkpoint.remove_covered_batches, self._paths, self.attempt)
                await self._collect()
                # Not before: from then on the run may be over, and what is under way here is cancelled.
                self._complete = self._complete or event.step >= self.config.max_steps
            case "finished":
                self._finished = True

    async def _save(self, event: Event) -> None:
        snapshot = self._snapshots.get(event.step)
        if snapshot is None or event.path is None:
            logger.error(f"the checkpoint of step {event.step} stays incomplete: nothing is known of that step")
            return
        whole = replace(snapshot, unwritten=self._metrics.unwritten(event.step))
        with storage_errors(Path(event.path)):
            await asyncio.to_thread(checkpoint.write_snapshot, Path(event.path), whole)
        await self.trainer.checkpoint_saved(event.step)
        for step in [step for step in self._snapshots if step <= event.step]:
            del self._snapshots[step]

    async def _collect(self) -> None:
        """Delete of the journal what the newest complete checkpoint covers."""
        if self._journal is None:
            return
        covering = await asyncio.to_thread(checkpoint.newest_complete, self._paths, self.attempt)
        if covering is not None:
            await self._journal.collect(covering.ledger.settled())

    async def _forget(self, step: int) -> None:
        """Without checkpoints nothing of a trained step is needed again."""
        if self.config.checkpoint.enabled:
            return
        for old in [number for number in self._snapshots if number <= step]:
            del self._snapshots[old]
        if not self.config.record_rollouts:
            await asyncio.to_thread(checkpoint.remove_batches, self._paths, through=step)

    # ---- batches

    async def _make_batches(self) -> None:
        try:
            await self._make_all_batches()
        except* TrainerGoneError:
            pass  # told to stop, the trainer ended before this task was cancelled

    async def _make_all_batches(self) -> None:
        await self._signal.until(lambda: self._sync.newest is not None)  # before, the trainer takes no batch
        if self._recording is not None:
            await self._replay(self._recording)
            return
        await self._readmit_batches()
        await self._readmit_rollouts()
        async with asyncio.TaskGroup() as tasks:
            dispatching = tasks.create_task(self._dispatcher.run())
            while self._made < self.config.max_steps:
                await self._signal.until(lambda: self._next_groups() is not None)
                groups = self._next_groups()
                assert groups is not None
                await self._make_batch(groups)
            dispatching.cancel()

    def _next_groups(self) -> list[FinishedGroup] | None:
        step, limit = self._made + 1, self.config.algorithm.max_off_policy_steps
        if self._dispatcher.waits_for(step):
            return None
        usable, _ = split_by_age(self._buffer, step=step, max_off_policy_steps=limit)
        return choose_first(usable, self.config.batch_size, step=step, max_off_policy_steps=limit)

    async def _make_batch(self, groups: list[FinishedGroup]) -> None:
        began, step = time.monotonic(), self._made + 1
        self._buffer = [group for group in self._buffer if group not in groups]
        self._ledger.accept(group.number for group in groups)
        tasks = tuple((group.number, self._sampler.draw(group.number).task) for group in groups)
        self._sampler.accept(step, {group.number: group.mean_reward for group in groups})
        self._take_step(step)
        self._expire(step + 1)
        dropped = self._dispatcher.take_dropped()
        batch = await asyncio.to_thread(self._write, groups, step, dropped, tasks)
        counters = dict(self._ledger.counters)
        metrics = batch_metrics(batch) | group_metrics(groups) | filter_metrics(groups, self._rules)
        metrics |= counter_metrics(counters, self._counted)
        metrics |= {
            f"environment/{a.config.label}/{k}": v for a in self._arenas for k, v in a.environment.metrics().items()
        }
        metrics["rollouts/in_flight"] = float(self._dispatcher.running)
        metrics["time/make_batch"] = time.monotonic() - began
        metrics["time/update_weights"] = self._sync.seconds
        metrics |= self._pool.metrics()
        metrics |= self._sampler.metrics()
        self._counted = counters
        await self._announce(batch, metrics)

    def _take_step(self, step: int) -> None:
        self._made = step
        self._snapshots[step] = Snapshot(step, self._ledger.state(), sampler=self._sampler.state())
        self._signal.notify()

    def _expire(self, step: int) -> None:
        """Give up what no batch from `step` on may hold."""
        limit = self.config.algorithm.max_off_policy_steps
        self._buffer, expired = split_by_age(self._buffer, step=step, max_off_policy_steps=limit)
        for group in expired:
            self._ledger.again(group.number, "age")
        self._dispatcher.cancel_too_old(step)

    def _write(
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
        batch = replace(batch, dropped=dropped, tasks=tasks)
        self._write_batch(batch)
        with storage_errors(self._paths.traces):
            write_trace(self._paths.trace(step), batch, groups)
        return batch

    def _write_batch(self, batch: Batch) -> None:
        try:
            with storage_errors(self._paths.rollouts):
                write_batch(self._paths.batch(batch.step, self.attempt.attempt), batch)
        except BatchError as error:
            raise RoleError(str(error), exit_codes.DATA) from error

    async def _announce(self, batch: Batch, metrics: dict[str, float]) -> None:
        self._metrics.add(batch.step, "batch", metrics)
        await self.trainer.batch_ready(batch.step, str(self._paths.batch(batch.step, self.attempt.attempt)))

    async def _readmit_batches(self) -> None:
        """Batches that an earlier attempt made for steps after the base, and that are fresh enough, are trained as they are."""
        found = checkpoint.readmissible(
            self._paths,
            self.attempt,
            self._ledger,
            max_off_policy_steps=self.config.algorithm.max_off_policy_steps,
        )
        while self._made < self.config.max_steps and (batch := next(found, None)) is not None:
            self._sampler.readmit(batch, group_means(batch))
            metrics = batch_metrics(batch)
            rollouts = int(metrics["batch/rollouts"])
            self._ledger.counters["readmitted"] += rollouts
            self._counted["readmitted"] = self._ledger.counters["readmitted"]
            self._take_step(batch.step)
            await asyncio.to_thread(self._write_batch, batch)
            metrics |= {"batch/readmitted": 1.0, "rollouts/readmitted": float(rollouts), "rollouts/discarded": 0.0}
            await self._announce(batch, metrics)

    async def _readmit_rollouts(self) -> None:
        """Finished rollouts of earlier attempts that are in no batch count again: to the buffer as if they had finished just now."""
        if self._journal is None:
            return
        settled = self._ledger.state().settled()
        found = await asyncio.to_thread(
            read_journal, self._paths, self.attempt, fingerprint=self._fingerprint, settled=settled
        )
        back = readmit(
            found,
            step=self._made + 1,
            max_off_policy_steps=self.config.algorithm.max_off_policy_steps,
            ledger=self._ledger,
            sampler=self._sampler,
            environments=[(arena.config.label, arena.config.group_size) for arena in self._arenas],
            finish=self._dispatcher.settle,
            drop=self._dispatcher.drop,
        )
        self._dispatcher.readmit(back)
        self._ledger.counters["readmitted"] += back.rollouts
        self._ledger.counters.update({f"discarded/{reason}": count for reason, count in back.refused.items()})
        if back.rollouts or back.refused:
            logger.info(f"journal: {back}")
        self._signal.notify()

    async def _replay(self, recording: Recording) -> None:
        depth = self.config.algorithm.max_async_level
        for step in range(self._made + 1, self.config.max_steps + 1):
            await self._until_published(step - 1 - depth)
            batch = await asyncio.to_thread(recording.batch, step, attempt=self.attempt.attempt)
            self._take_step(step)
            await asyncio.to_thread(self._write_batch, batch)
            await self._announce(batch, batch_metrics(batch))

    async def _until_published(self, version: int) -> None:
        await self._signal.until(lambda: self._sync.newest is not None and self._sync.newest >= version)

    # ---- evaluation

    async def _evaluate_all(self) -> None:
        while True:
            version = await self._evaluations.get()
            try:
                metrics = await self._evaluate(version)
            finally:
                self._sync.release(version)
            self._metrics.add(version, "evaluation", metrics)
            self._evaluating -= 1
            self._signal.notify()

    async def _evaluate(self, version: int) -> dict[str, float]:
        began = time.monotonic()
        await self._signal.until(lambda: self._pool.version == version or not self._sync.held(version))
        if not self._sync.held(version):
            return {}
        try:
            async with asyncio.timeout(HOLD_SECONDS):
                answers = await self._evaluator.evaluate(version)
        except TimeoutError:
            logger.warning(f"the evaluation of version {version} is given up: it took longer than {HOLD_SECONDS:g} s")
            return {}
        with storage_errors(self._paths.traces):
            lines = [{"policy_version": version} | trace_line(answer) for answer in answers]
            await asyncio.to_thread(write_jsonl, self._paths.evaluation_trace(version), lines)
        metrics = evaluation_metrics(answers)
        suffix = "/reward/mean"
        self._eval_rewards |= {k[5 : -len(suffix)]: v for k, v in metrics.items() if k.endswith(suffix)}
        return metrics | {"time/evaluate": time.monotonic() - began}

    # ---- for people

    def progress(self) -> Progress:
        """What the run does at the moment."""
        last = self._metrics.last
        return Progress(
            step=self._trained,
            max_steps=self.config.max_steps,
            policy_version=self._pool.version,
            checkpoint_step=self._checkpoint_step,
            resumed_from_step=self._resumed_from,
            reward=last.get("reward/mean"),
            eval=dict(self._eval_rewards),
            tokens_per_second=last.get("perf/throughput"),
            staleness_mean=last.get("off_policy/mean"),
            waiting_on=self._waiting_on(),
            eta_seconds=self._clock.remaining_seconds(self.config.max_steps),
            in_flight=self._dispatcher.running,
            errors=self._ledger.counters["errors"],
            readmitted=self._ledger.counters["readmitted"],
            discarded=discarded(self._ledger.counters),
        )

    def _waiting_on(self) -> str:
        state = self.trainer.state
        if self._sync.newest is None:
            return "the trainer's first weights"
        if self._pool.version is None and self._recording is None:
            return "engines: " + self._pool.problems()
        if self._trained < self._made and state is not None:
            since = max(0.0, time.time() - state.phase_since)
            return f"trainer {state.phase.replace('_', ' ')} step {self._trained + 1} since {since:.1f} s"
        if self._evaluating:
            return f"the evaluation of version {self._pool.version}"
        if self._made >= self.config.max_steps:
            return "the last checkpoint"
        done = sum(len(group.rollouts) for group in self._buffer)
        kept, lost = self._ledger.counters["readmitted"], discarded(self._ledger.counters)
        return (
            f"rollouts for step {self._made + 1}: {done} of {self.config.batch_size} done, "
            f"{self._dispatcher.running} in flight"
            + (f"; restarts gave back {kept} finished rollouts and lost {lost}" if kept or lost else "")
        )
