"""One run in the trainer: all that is its own, from its first version to its last checkpoint. The same on every rank.

    join     set the adapters, load the base checkpoint, publish the base version
    step n   train on batch n -> publish version n -> save a checkpoint when it is due
    finish   tell the orchestrator, wait until it says that all is done
    leave    save the last finished step, with the orchestrator's part if it is there

A trainer has one slot, or several that take turns (`main`). Rank 0 alone talks to the orchestrator and owns manifests and retention: what
only it has is None elsewhere.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from loguru import logger

from rlrun.config.roles import TrainerConfig
from rlrun.protocol import exit_codes
from rlrun.protocol.attempts import Attempt
from rlrun.protocol.channel import Phase
from rlrun.protocol.failures import RoleError, storage_errors
from rlrun.protocol.paths import RunPaths
from rlrun.trainer import checkpoint, export, lora, publish, versions
from rlrun.trainer.channel import Channel
from rlrun.trainer.checkpoint import POLICY, Part, Progress
from rlrun.trainer.completion import Completer
from rlrun.trainer.critic import CRITIC
from rlrun.trainer.feed import Feed
from rlrun.trainer.learner import make_learner
from rlrun.trainer.optimizers import make_optimizer
from rlrun.trainer.policy import Policy
from rlrun.trainer.saving import Saver, Written
from rlrun.trainer.step import objective, parameter_checksum
from rlrun.trainer.steps import Steps

SHUTDOWN_SECONDS = 7200.0
"""Longest wait for the orchestrator's last evaluation and its `shutdown` after the last step."""
COMPLETION_SECONDS = 600.0
"""Longest wait for the manifest of the last checkpoint once nothing else is left to do."""


class Slot:
    """A run that is trained.

    Args:
        config: the run's.
        attempt: which has begun.
        policy: that it trains; it holds the run's values from here on.
        output_dir: the run's folder.
        replay: whether the batches are recorded ones, and there is no orchestrator.
        channel: to its orchestrator, on rank 0.
        feed: where its batches come from, on rank 0.
        agree: called by all ranks together where a step may be left; raises on all of them when they are to stop.
        label: put before what is logged; empty for the trainer's own run.

    Raises:
        RoleError: an objective, a model beside the policy or a checkpoint cannot be loaded.
    """

    def __init__(
        self,
        config: TrainerConfig,
        attempt: Attempt,
        policy: Policy,
        *,
        output_dir: Path,
        replay: bool,
        channel: Channel | None,
        feed: Feed | None,
        agree: Callable[[], None],
        label: str = "",
    ) -> None:
        self.config, self.attempt, self.number = config, attempt, attempt.attempt
        self.paths = RunPaths(output_dir)
        self.channel, self.feed = channel, feed
        self.stage: Literal["training", "finished", "leaving"] = "training"
        self.progress = Progress()
        self.saved_step = attempt.base_step
        """The last step whose checkpoint was begun."""
        self._policy, self._group, self._agree, self._label = policy, policy.group, agree, label
        self._replay = replay
        self._deadline = math.inf
        self._ends = False
        """Whether the data ends with the step that is being trained."""
        self._since = time.perf_counter()
        """End of the step before."""
        self._arrived: float | None = None
        """When rank 0 first saw the next batch."""
        policy.adapters.hold(config.name, config.lora)
        lora.initialise(policy.module, config.seed)
        optimizer = make_optimizer(policy.module, config.optimizer, self._group.device)
        loss = objective(config.algorithm, config.seq_len)
        learner = make_learner(config, policy.module, optimizer, loss, source=policy.source, group=self._group)
        self._steps = Steps(config, policy, learner)
        self._parts = {POLICY: Part(policy.module, optimizer)}
        if learner.critic is not None:
            self._parts[CRITIC] = Part(learner.critic.module, learner.critic.optimizer)
        self._load()
        self._saver = Saver(self._parts, self._group, background=config.checkpoint.save_async)
        self._completer = self._start_completer() if self._group.leads else None

    @property
    def name(self) -> str:
        """The run's."""
        return self.config.name

    def _say(self, message: str) -> None:
        logger.info(f"{self._label}{message}")

    def _load(self) -> None:
        attempt, say = self.attempt, logger.warning if self._group.leads else None
        if attempt.base_attempt is not None:
            base = self.paths.checkpoint(attempt.base_step, attempt.base_attempt)
            self.progress = checkpoint.load(self._parts, base, say=say)
        elif attempt.origin is not None:
            checkpoint.load(self._parts, Path(attempt.origin.path), say=say)  # the progress is the other run's

    def _start_completer(self) -> Completer:
        channel = self.channel

        def completed(step: int, path: Path) -> None:
            self._say(f"step {step}: the checkpoint is complete")
            if channel is not None:
                channel.emit("checkpoint_complete", step, path=path)
                channel.news.set()

        completer = Completer(
            self.paths,
            self.attempt,
            self.config.checkpoint,
            with_orchestrator=channel is not None,
            on_complete=completed,
        )
        if channel is not None:
            channel.agreed = completer.agreed
        return completer

    # ---- what rank 0 sees of it

    def problem(self) -> RoleError | None:
        """Why the run cannot go on, though nothing of it is computed at the moment."""
        try:
            self._saver.check()
        except RoleError as error:
            return error
        if self._completer is not None and self._completer.failure is not None:
            return self._completer.failure
        if time.monotonic() > self._deadline and self.stage == "finished":
            return RoleError(
                f"the orchestrator has not ended the run within {SHUTDOWN_SECONDS:.0f} s after the last step",
                exit_codes.FAILURE,
            )
        return None

    def trained(self) -> bool:
        """Whether no step is left: all are trained, the data has ended, or the orchestrator says so."""
        if self.progress.step >= self.config.max_steps or self._ends:
            return True
        return self.feed is not None and self.feed.ended()

    def ready(self) -> bool:
        """Whether the batch of the next step is there."""
        assert self.feed is not None
        found = self.feed.ready(self.progress.step + 1)
        if found and self._arrived is None:
            self._arrived = time.perf_counter()
            self.phase("waiting_for_turn")
        return found

    def next_batch(self) -> Path | None:
        """Take the batch of the next step, once it is ready."""
        assert self.feed is not None
        return self.feed.poll(self.progress.step + 1, 0.0)

    def silence(self) -> float:
        """Seconds since the orchestrator last asked for something."""
        return (
            0.0 if self.channel is None or self.channel.has_client() else time.monotonic() - self.channel.last_contact
        )

    def over(self) -> bool:
        """Whether the orchestrator has ended the finished run."""
        return self.channel is None or self.channel.shutdown.is_set()

    def left(self) -> bool:
        """Whether all is saved that can be saved of a run that leaves."""
        assert self._completer is not None
        if not self._saver.idle:
            return time.monotonic() > self._deadline
        waits = self.attempt.base_step < self.saved_step != self._completer.completed and self._can_complete()
        return not waits or time.monotonic() > self._deadline

    def end(self) -> RoleError | None:
        """Wait for the last manifest of a run that is over; returns why there is none."""
        assert self._completer is not None
        if not self._completer.close(COMPLETION_SECONDS):
            return RoleError(
                f"the last checkpoint was not completed within {COMPLETION_SECONDS:.0f} s", exit_codes.FAILURE
            )
        return self._completer.failure

    # ---- what all ranks do together

    def begin(self) -> None:
        """Publish the base version, and take batches from then on."""
        self._policy.adapters.hold(self.name, self.config.lora)
        if self.channel is not None:
            self.channel.begin(self.attempt.base_step)
        if self.config.task == "RL":
            self._publish()
        self._wait_for_batch()

    def step(self, path: Path) -> None:
        """Train the next step on the batch in `path`, with everything that follows from it."""
        step, taken = self.progress.step + 1, time.perf_counter()
        self._policy.adapters.hold(self.name, self.config.lora)
        batch = self._steps.read(path, step, written_by=None if self._replay else self.number)
        self._ends = self._ends or batch.last
        validation = None if self._replay else batch.validation
        if validation is not None and validation.before:
            self.phase("validating")
            before = self._steps.validate(validation)
            if self.channel is not None:
                self.channel.emit("validated", step - 1, metrics=before)
        self.phase("training")
        metrics = self._steps.train(step, batch, self._agree)
        self.progress.step = step
        skipped = int(metrics.pop("skipped"))
        self.progress.skipped_steps += skipped
        if skipped and self._group.leads:
            logger.warning(f"{self._label}step {step}: the gradient is not finite; nothing is updated")
        metrics["skipped_steps"] = float(self.progress.skipped_steps)
        metrics["param_checksum"] = parameter_checksum(self._policy.module)
        arrived = self._arrived or taken
        metrics["time/wait_for_batch"] = arrived - self._since
        metrics["time/wait_for_turn"] = taken - arrived
        if validation is not None and validation.after:
            self.phase("validating")
            metrics |= self._steps.validate(validation)
        metrics["time/broadcast_weights"] = self._publish() if self._publication_due(step) else 0.0
        due = self._checkpoint_due(step)
        metrics["time/save_ckpt"] = self._save() if due else 0.0
        if (written := self._saver.finished()) is not None:
            metrics["time/write_ckpt"] = written.seconds
        metrics["time/step"] = time.perf_counter() - self._since
        self._report(step, metrics)
        if due:
            self._saver.then(self._written)  # after the report: the orchestrator expects `trained` first
        self._wait_for_batch()

    def finish(self) -> None:
        """The last step is trained: wait for its files, and from then on for the orchestrator's last word."""
        step = self.progress.step
        all_trained = step >= self.config.max_steps or self._ends
        self._say(f"all {step} steps are trained" if all_trained else "the orchestrator says that all is done")
        self.phase("finished")
        self._saver.wait()
        self._saver.check()
        if self.channel is not None:
            self.channel.emit("finished", step)
        self.stage, self._deadline = "finished", time.monotonic() + SHUTDOWN_SECONDS

    def leave(self) -> None:
        """Begin to save the last finished step, if it is not saved."""
        self.phase("saving")
        self._saver.wait()
        self._saver.check()
        unsaved = self.config.checkpoint.enabled and self.progress.step > self.saved_step
        if unsaved and self._group.broadcast(self._can_complete()):
            self._policy.adapters.hold(self.name, self.config.lora)
            self._save()
            self._saver.then(self._written)
        self.stage = "leaving"
        self._deadline = time.monotonic() + self.config.checkpoint.grace_period_seconds

    def complete(self, why: str) -> None:
        """Wait until the checkpoint that `leave` began is complete, where that can still be.

        Args:
            why: the run ends, for the log.
        """
        step = self.progress.step
        self._saver.wait()
        self._saver.check()
        complete = step == self.attempt.base_step
        if self._completer is not None and self.saved_step == step > self.attempt.base_step:
            complete = self._completer.wait_for(step, worth=self._can_complete)
        self._group.barrier()  # rank 0 is the one that waits for the manifest
        if self._group.leads:
            after = f"{why} after step {step}"
            self._say(after if complete else f"{after}, without a complete checkpoint of it")

    def close(self, *, wait: bool) -> None:
        """Give up what the run has in this process, but its channel. `wait` for what is being written, unless it has failed."""
        self._saver.close(wait=wait)
        if self._completer is not None:
            self._completer.close(COMPLETION_SECONDS if wait else 0.0)
        self._policy.adapters.forget(self.name)

    def _wait_for_batch(self) -> None:
        self._since, self._arrived = time.perf_counter(), None
        self.phase("waiting_for_batch")

    def _publish(self) -> float:
        """Publish the parameters as they are; returns seconds."""
        with self._timed("publishing") as timer:
            step, module, group = self.progress.step, self._policy.module, self._group
            path = self.paths.version(step, self.number)
            dtype, adapters, files = self.config.model.dtype, self.config.lora, self._policy.files
            exports = step > self.attempt.base_step and self._export_due(step)
            if adapters is not None and adapters.served_as_adapter:
                about = lora.adapter_config(module, adapters, self._policy.source)
                publish.publish_adapter(module, path, config=about, dtype=dtype, group=group)
                if exports:  # an export is a whole model
                    output = self.paths.export(step, self.number)
                    publish.publish(module, output, files=files, dtype=dtype, group=group)
            else:
                publish.publish(module, path, files=files, dtype=dtype, group=group)
                if exports and group.leads:
                    export.export_version(path, self.paths.export(step, self.number))
            if group.leads:
                if self.channel is not None:
                    self.channel.emit("published", step, path=path)
                versions.delete_superfluous(
                    self.paths, attempt=self.attempt, max_async_level=self.config.algorithm.max_async_level
                )
        return timer[0]

    def _is_last(self, step: int) -> bool:
        return self._ends or step == self.config.max_steps

    def _publication_due(self, step: int) -> bool:
        """Engines need every version; without engines the versions of checkpoints, and the last, are for people."""
        if self.config.task == "RL" or self._checkpoint_due(step):
            return True
        return self._is_last(step) or self._export_due(step)

    def _export_due(self, step: int) -> bool:
        return export.due(self.config.checkpoint.export, step, last=self._is_last(step))

    def _checkpoint_due(self, step: int) -> bool:
        config = self.config.checkpoint
        return config.enabled and (step % config.interval == 0 or self._is_last(step))

    def _save(self) -> float:
        """Start to save this rank's shards; returns the seconds that the loop stood still."""
        with self._timed("saving") as timer:
            self._saver.save(self.progress, self.paths.checkpoint(self.progress.step, self.number))
            self.saved_step = self.progress.step
        return timer[0]

    def _written(self, written: Written) -> None:
        """All ranks' shards are durable: on rank 0 the rest of the checkpoint follows. Called in the saver's thread."""
        if self.channel is not None:
            self.channel.emit("checkpoint_saved", written.step, path=written.path)
        if self._completer is not None:
            self._completer.saved(written.step, written.path)

    def _can_complete(self) -> bool:
        return self.channel is None or self.channel.has_client()

    def _report(self, step: int, metrics: dict[str, float]) -> None:
        if not self._group.leads:
            return
        self._say(
            f"step {step}/{self.config.max_steps}: loss {metrics['loss']:.4g}, grad_norm {metrics['grad_norm']:.4g}, "
            f"lr {metrics['lr']:.3g}, {metrics['perf/throughput']:.0f} tokens/s, step {metrics['time/step']:.2f} s, "
            f"waited {metrics['time/wait_for_batch']:.2f} s"
        )
        if self._replay:
            finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
            line = json.dumps({"step": step, "attempt": self.number, **finite})
            with storage_errors(self.paths.root, "write metrics"), self.paths.metrics.open("a") as file:
                file.write(line + "\n")
        if self.channel is not None:
            self.channel.emit("trained", step, metrics=metrics)

    def phase(self, phase: Phase) -> None:
        """Tell the orchestrator what is done."""
        if self.channel is not None:
            self.channel.phase(phase)

    @contextmanager
    def _timed(self, phase: Phase) -> Iterator[list[float]]:
        """Seconds that the block took, as the only element of a list once it has ended."""
        self.phase(phase)
        elapsed: list[float] = []
        began = time.perf_counter()
        yield elapsed
        elapsed.append(time.perf_counter() - began)
