"""One run in the stub trainer, in the order of the real one; a step only waits and moves the policy."""

from __future__ import annotations

import errno
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from loguru import logger

from rlrun.config.models.roles import TrainerConfig
from rlrun.diagnostics.fault_points import reach
from rlrun.protocol.files.attempts import Attempt
from rlrun.protocol.files.batch import Batch, Validation
from rlrun.protocol.files.checkpoint_manifest import (
    TRAINER_PART,
    describe_part,
    flush_trainer_part,
    remove_trainer_part,
)
from rlrun.protocol.files.durable import make_folder
from rlrun.protocol.files.failures import RoleError
from rlrun.protocol.files.paths import RunPaths
from rlrun.protocol.files.volume_faults import Volume, trouble_of, watch_volume
from rlrun.trainer.channel.batch_feed import TICK_SECONDS, LiveFeed, read_checked
from rlrun.trainer.channel.run_channel import Channel
from rlrun.trainer.checkpoints.completion import Completer
from rlrun.trainer.checkpoints.unsaved import Refused, Retry
from rlrun.trainer.engines_beside import EnginesBeside
from rlrun.trainer.weights import version_retention
from tests.support.stub.metrics import step_metrics, validation_metrics
from tests.support.stub.policy import (
    WEIGHTS,
    Policy,
    read_policy,
    small_files,
    write_adapter,
    write_model,
    write_policy,
)
from tests.support.stub.script import Script

SHUTDOWN_SECONDS = 7200.0
"""Longest wait for the orchestrator's last evaluation and its `shutdown` after the last step."""
COMPLETION_SECONDS = 600.0
"""Longest wait for the manifest of the last checkpoint after other work has ended."""


class Run:
    """The trainer's own run, or a guest's.

    Args:
        config: the run's configuration of the trainer.
        attempt: the started attempt.
        channel: channel to the run's orchestrator.
        model: folder of its first model.
        script: durations and faults.
        before_step: function called with the step after its batch has arrived: the other pods, and faults.
        label: prefix of log lines.
        engines: engines that share its GPUs; none may be awake in a step.
    """

    def __init__(
        self,
        config: TrainerConfig,
        attempt: Attempt,
        channel: Channel,
        *,
        model: Path,
        script: Script,
        before_step: Callable[[int], None],
        label: str = "",
        engines: EnginesBeside | None = None,
    ) -> None:
        self._engines = engines
        self.config, self.attempt, self.channel, self.script = config, attempt, channel, script
        self.number, self._before_step, self._label = attempt.attempt, before_step, label
        self.paths = RunPaths(Path(config.output_dir))
        self.feed = LiveFeed(channel)
        self.leaving = threading.Event()
        """Set if the run has to end at once, without a checkpoint."""
        self.ends = False
        """Whether a batch was marked as the last one, because the data is exhausted."""
        self.volume = Volume(self.paths.root, say=logger.warning)
        """Volume for its files."""
        self._retry = Retry(self.volume)
        self._refused: Refused | None = None
        self._full_until: dict[int, float] = {}
        """End of each fault of the kind `disk_full`, which starts with its first checkpoint."""
        channel.trouble = self.volume.trouble
        self.policy = self._load(model)
        self.completer = Completer(
            self.paths,
            self.attempt,
            config.checkpoint,
            with_orchestrator=True,
            on_complete=self._completed,
            volume=self.volume,
        )
        channel.agreed = self.completer.agreed

    def _say(self, message: str) -> None:
        logger.info(f"{self._label}{message}")

    def _load(self, model: Path) -> Policy:
        policy = read_policy(model / WEIGHTS)
        self.files = small_files(model)
        self.vocabulary = int(json.loads(self.files["config.json"])["vocab_size"])
        if self.attempt.base_attempt is None:
            if self.attempt.origin is not None:  # the guest's weights; the steps are counted from its own start
                origin = read_policy(Path(self.attempt.origin.path) / TRAINER_PART / WEIGHTS)
                policy = replace(origin, step=0)
            return policy
        base = self.paths.checkpoint(self.attempt.base_step, self.attempt.base_attempt)
        return read_policy(base / TRAINER_PART / WEIGHTS)

    def _completed(self, step: int, path: Path) -> None:
        self._say(f"step {step}: the checkpoint is complete")
        self.channel.append_event("checkpoint_complete", step, path=path)

    def run(self) -> None:
        """Run all steps, until the orchestrator's last message.

        Raises:
            RoleError: the run cannot continue.
        """
        self.channel.accept_batches(self.attempt.base_step)
        with watch_volume(self.volume):
            self._run()

    def _run(self) -> None:
        self._publish()
        self._release()
        while self.policy.step < self.config.max_steps and not self.ends:
            if not self._step(self.policy.step + 1):
                self._say("it leaves" if self.leaving.is_set() else "the orchestrator ended the run")
                break
        else:
            self._say(f"all {self.policy.step} steps are trained")
        if not self.leaving.is_set():
            self._finish()

    def _step(self, step: int) -> bool:
        began = time.perf_counter()
        self.channel.phase("waiting_for_batch")
        path = self._next_batch(step)
        if path is None:
            return False
        times = {"time/wait_for_batch": time.perf_counter() - began}
        batch = self._read(path, step, self.number)
        if self._engines is not None:
            self._engines.check()
        self.ends = batch.last
        held_out = batch.validation
        if held_out is not None and held_out.before:
            self.channel.append_event("validated", step - 1, metrics=self._validate(held_out))
        self.channel.phase("training")
        with _timed(times, "time/forward_backward"):
            self._before_step(step)
            time.sleep(self.script.trainer.step_seconds)
            self.policy = self.policy.trained(self.script.policy)
            reach("step.trained")
        measured = self._validate(held_out) if held_out is not None and held_out.after else {}
        last, config = self.ends or step == self.config.max_steps, self.config.checkpoint
        due = config.enabled and (step % config.interval == 0 or last)
        due = due or (self._refused is not None and self._retry.is_due(self._refused, blocks=False))
        with _timed(times, "time/broadcast_weights"):
            if self.config.task == "RL" or due or last:
                self._publish()
        with _timed(times, "time/save_ckpt"):
            saved = self._save(step) if due else None
        times["time/step"] = time.perf_counter() - began
        self._report(step, batch, times | measured, saved)
        self._release()
        return True

    def _release(self) -> None:
        if self._engines is not None:
            self.channel.append_event("released", self.policy.step)

    def _read(self, path: Path, step: int, written_by: int | None) -> Batch:
        return read_checked(
            path, step=step, vocabulary=self.vocabulary, seq_len=self.config.seq_len, attempt=written_by
        )

    def _validate(self, validation: Validation) -> dict[str, float]:
        self.channel.phase("validating")
        return validation_metrics(self._read(Path(validation.path), 0, None), self.policy)

    def _next_batch(self, step: int) -> Path | None:
        while not self.feed.is_exhausted() and not self.leaving.is_set():
            self._check_completer()
            if (path := self.feed.take_batch(step, TICK_SECONDS)) is not None:
                return path
        return None

    def _publish(self) -> None:
        self.channel.phase("publishing")
        path = self.paths.version(self.policy.step, self.number)

        def write() -> None:
            if self.config.lora is not None and self.config.lora.served_as_adapter:
                write_adapter(path, self.policy, self.config.lora.rank)
            else:
                write_model(path, self.policy, self.files, complete=True)

        self.volume.insist(f"publish the weights of step {self.policy.step}", write)
        self.channel.append_event("published", self.policy.step, path=path)
        reach("weights.told")
        version_retention.delete_superfluous(
            self.paths, attempt=self.attempt, max_async_level=self.config.algorithm.max_async_level
        )

    def _save(self, step: int) -> Path | None:
        """Save the shards and return their folder, or None if the volume refuses them: they are retried after a later
        step."""
        self.channel.phase("saving")
        path, last = self.paths.checkpoint(step, self.number), self.ends or step == self.config.max_steps
        while True:
            try:
                self._write_shards(path, step)
            except Exception as error:
                trouble = trouble_of(error, path)
                if trouble is None:
                    raise
                remove_trainer_part(path)
                self._refused = Refused(step, trouble)
                while not self._retry.is_due(self._refused, blocks=last) and last:
                    time.sleep(TICK_SECONDS)
                if not last:
                    return None
            else:
                self._refused = None
                self._retry.report_durable()
                return path

    def _write_shards(self, path: Path, step: int) -> None:
        remove_trainer_part(path)
        reach("checkpoint.shards.before_write")
        make_folder(path / TRAINER_PART)
        for number, fault in enumerate(self.script.trainer.faults):
            if fault.attempt not in (None, self.number):
                continue
            if fault.action == "slow_save" and fault.step == step:
                time.sleep(fault.seconds)
            elif fault.action == "disk_full" and fault.step <= step:
                ends = self._full_until.setdefault(number, time.monotonic() + fault.seconds)
                if time.monotonic() < ends:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write_policy(path / TRAINER_PART / WEIGHTS, self.policy)
        flush_trainer_part(path)
        reach("checkpoint.shards.durable")

    def _report(self, step: int, batch: Batch, times: dict[str, float], saved: Path | None) -> None:
        metrics = step_metrics(self.config, batch, self.policy, times)
        self._say(
            f"step {step}/{self.config.max_steps}: loss {metrics['loss']:.4g}, lr {metrics['lr']:.3g}, "
            f"step {metrics['time/step']:.2f} s, waited {metrics['time/wait_for_batch']:.2f} s"
        )
        self.channel.append_event("trained", step, metrics=metrics)
        if saved is not None:
            self.channel.append_event("checkpoint_saved", step, path=saved)
            self.completer.saved(step, saved, describe_part(saved, saved / TRAINER_PART))

    def _finish(self) -> None:
        """Wait for the orchestrator's last message, and for the last manifest."""
        self.channel.phase("finished")
        self.channel.append_event("finished", self.policy.step)
        deadline = time.monotonic() + SHUTDOWN_SECONDS
        while not self.channel.shutdown.wait(TICK_SECONDS):
            self._check_completer()
            if self.leaving.is_set():
                return
            if time.monotonic() > deadline:
                raise RoleError(
                    f"the orchestrator did not end the run within {SHUTDOWN_SECONDS:.0f} s after the last step"
                )
        if not self.completer.close(COMPLETION_SECONDS):
            raise RoleError(f"the last checkpoint was not completed within {COMPLETION_SECONDS:.0f} s")
        self._check_completer()

    def save_last(self) -> None:
        """Complete the last finished step's checkpoint after a stop request, if an orchestrator writes its part."""
        step, config = self.policy.step, self.config.checkpoint
        if not config.enabled or step == self.attempt.base_step:
            return
        saved = self._save(step) if step % config.interval else None  # otherwise the step itself has saved it
        if saved is not None:
            self.channel.append_event("checkpoint_saved", step, path=saved)
            self.completer.saved(step, saved, describe_part(saved, saved / TRAINER_PART))
        complete = self.completer.wait_for(step, worth=self.channel.has_client)
        self._say(f"asked to stop after step {step}" + ("" if complete else ", without a complete checkpoint of it"))

    def _check_completer(self) -> None:
        if self.completer.failure is not None:
            raise self.completer.failure


@contextmanager
def _timed(times: dict[str, float], name: str) -> Iterator[None]:
    began = time.perf_counter()
    yield
    times[name] = time.perf_counter() - began
