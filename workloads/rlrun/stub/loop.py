"""The stub trainer's loop, in the order of the real one; a step only takes its time and moves the policy."""

from __future__ import annotations

import errno
import json
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from loguru import logger

from rlrun.config.roles import TrainerConfig
from rlrun.config.run import fingerprint
from rlrun.protocol import exit_codes
from rlrun.protocol.attempts import Attempt, read_attempt
from rlrun.protocol.batch import Batch
from rlrun.protocol.durable import fsync_tree
from rlrun.protocol.failures import RoleError, storage_errors, write_error
from rlrun.protocol.manifest import TRAINER_PART
from rlrun.protocol.paths import RunPaths
from rlrun.stub.group import Leader, follow, master, place
from rlrun.stub.metrics import step_metrics
from rlrun.stub.model import ensure_model
from rlrun.stub.policy import WEIGHTS, Policy, read_policy, small_files, write_model, write_policy
from rlrun.stub.script import Script, happen, load_script
from rlrun.trainer import resume, versions
from rlrun.trainer.channel import Channel
from rlrun.trainer.completion import Completer
from rlrun.trainer.feed import TICK_SECONDS, LiveFeed, read_checked

SHUTDOWN_SECONDS = 7200.0
"""Longest wait for the orchestrator's last evaluation and its `shutdown` after the last step."""
COMPLETION_SECONDS = 600.0
"""Longest wait for the manifest of the last checkpoint once nothing else is left to do."""


class _Trainer:
    """Pod 0's part."""

    def __init__(self, config: TrainerConfig, attempt: int, api_key: str, script: Script, group: Leader) -> None:
        self.config, self.script, self.group, self.number = config, script, group, attempt
        self.paths = RunPaths(Path(config.output_dir))
        self.channel = Channel.listen(
            attempt=attempt,
            api_key=api_key,
            host=config.host,
            port=config.port,
            batch_path=lambda step: self.paths.batch(step, attempt),
        )
        self.feed = LiveFeed(self.channel)
        self.attempt = self._begin_attempt()
        self._happen(0)
        time.sleep(script.trainer.start_seconds)
        self.policy = self._load()
        self.completer = Completer(
            self.paths, self.attempt, config.checkpoint, with_orchestrator=True, on_complete=self._completed
        )
        self.channel.agreed = self.completer.agreed

    def _begin_attempt(self) -> Attempt:
        config = self.config
        with storage_errors(self.paths.attempts, "write the attempt's file"):
            base = resume.choose_base(self.paths, config.checkpoint.resume, with_orchestrator=True, log=logger.warning)
            origin = (
                resume.choose_origin(self.paths, config.checkpoint.resume, log=logger.warning) if base is None else None
            )
            begun = resume.begin_attempt(
                self.paths,
                base,
                origin=origin,
                attempt=self.number,
                world_size=config.world_size,
                config_hash=fingerprint(config),
                uid=config.uid,
            )
        start = "the model" if base is None else f"the checkpoint {base.checkpoint.path.name}"
        logger.info(f"attempt {self.number}: {config.world_size} ranks without torch, from {start}")
        return read_attempt(self.paths.attempt_file(begun.attempt))

    def _load(self) -> Policy:
        source = ensure_model(self.config, self.script.policy)
        policy = read_policy(source / WEIGHTS)
        self.files = small_files(source)
        self.vocabulary = int(json.loads(self.files["config.json"])["vocab_size"])
        if self.attempt.base_attempt is None:
            if self.attempt.origin is not None:  # its weights; this run's own steps
                origin = read_policy(Path(self.attempt.origin.path) / TRAINER_PART / WEIGHTS)
                policy = replace(origin, step=0)
            return policy
        base = self.paths.checkpoint(self.attempt.base_step, self.attempt.base_attempt)
        return read_policy(base / TRAINER_PART / WEIGHTS)

    def _completed(self, step: int, path: Path) -> None:
        logger.info(f"step {step}: the checkpoint is complete")
        self.channel.emit("checkpoint_complete", step, path=path)

    def run(self) -> int:
        """All steps; returns 0."""
        self.channel.begin(self.attempt.base_step)
        self._publish()
        while self.policy.step < self.config.max_steps:
            if not self._step(self.policy.step + 1):
                logger.info("the orchestrator says that all is done")
                break
        else:
            logger.info(f"all {self.config.max_steps} steps are trained")
        self._finish()
        self.group.finish()
        self.channel.close()
        return exit_codes.OK

    def _step(self, step: int) -> bool:
        began = time.perf_counter()
        self.channel.phase("waiting_for_batch")
        path = self._next_batch(step)
        if path is None:
            return False
        times = {"time/wait_for_batch": time.perf_counter() - began}
        self.channel.phase("training")
        batch = read_checked(
            path, step=step, vocabulary=self.vocabulary, seq_len=self.config.seq_len, attempt=self.number
        )
        with _timed(times, "time/forward_backward"):
            self.group.together(step)
            self._happen(step)
            time.sleep(self.script.trainer.step_seconds)
            self.policy = self.policy.trained(self.script.policy)
        with _timed(times, "time/broadcast_weights"):
            self._publish()
        config = self.config.checkpoint
        due = config.enabled and (step % config.interval == 0 or step == self.config.max_steps)
        with _timed(times, "time/save_ckpt"):
            saved = self._save(step) if due else None
        times["time/step"] = time.perf_counter() - began
        self._report(step, batch, times, saved)
        return True

    def _next_batch(self, step: int) -> Path | None:
        while not self.feed.ended():
            self._check_completer()
            if (path := self.feed.poll(step, TICK_SECONDS)) is not None:
                return path
        return None

    def _happen(self, step: int) -> None:
        happen(self.script.trainer.faults, attempt=self.number, step=step, pod=0)

    def _publish(self) -> None:
        self.channel.phase("publishing")
        path = self.paths.version(self.policy.step, self.number)
        with storage_errors(path.parent, "publish weights"):
            write_model(path, self.policy, self.files, complete=True)
        self.channel.emit("published", self.policy.step, path=path)
        versions.delete_superfluous(
            self.paths, attempt=self.attempt, max_async_level=self.config.algorithm.max_async_level
        )

    def _save(self, step: int) -> Path:
        self.channel.phase("saving")
        path = self.paths.checkpoint(step, self.number)
        with storage_errors(path.parent, "save the checkpoint"):
            shutil.rmtree(path, ignore_errors=True)
            (path / TRAINER_PART).mkdir(parents=True)
            for fault in self.script.trainer.faults:
                if fault.attempt in (None, self.number) and fault.step == step:
                    if fault.action == "slow_save":
                        time.sleep(fault.seconds)
                    elif fault.action == "disk_full":
                        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            write_policy(path / TRAINER_PART / WEIGHTS, self.policy)
            fsync_tree(path)
        return path

    def _report(self, step: int, batch: Batch, times: dict[str, float], saved: Path | None) -> None:
        metrics = step_metrics(self.config, batch, self.policy, times)
        logger.info(
            f"step {step}/{self.config.max_steps}: loss {metrics['loss']:.4g}, lr {metrics['lr']:.3g}, "
            f"step {metrics['time/step']:.2f} s, waited {metrics['time/wait_for_batch']:.2f} s"
        )
        self.channel.emit("trained", step, metrics=metrics)
        if saved is not None:
            self.channel.emit("checkpoint_saved", step, path=saved)
            self.completer.saved(step, saved)

    def _finish(self) -> None:
        """Wait for the orchestrator's last word, and for the last manifest."""
        self.channel.phase("finished")
        self.channel.emit("finished", self.policy.step)
        deadline = time.monotonic() + SHUTDOWN_SECONDS
        while not self.channel.shutdown.wait(TICK_SECONDS):
            self._check_completer()
            if time.monotonic() > deadline:
                raise RoleError(
                    f"the orchestrator has not ended the run within {SHUTDOWN_SECONDS:.0f} s after the last step"
                )
        if not self.completer.close(COMPLETION_SECONDS):
            raise RoleError(f"the last checkpoint was not completed within {COMPLETION_SECONDS:.0f} s")
        self._check_completer()

    def _check_completer(self) -> None:
        if self.completer.failure is not None:
            raise self.completer.failure


@contextmanager
def _timed(times: dict[str, float], name: str) -> Iterator[None]:
    began = time.perf_counter()
    yield
    times[name] = time.perf_counter() - began


def run(config: TrainerConfig, *, attempt: int, api_key: str) -> int:
    """One pod's part of an attempt.

    Args:
        config: the role's resolved configuration.
        attempt: this attempt's number, new in the run's folder.
        api_key: guards the channel to the orchestrator.

    Returns:
        The exit code 0.

    Raises:
        RoleError: what went wrong, for a person, with the exit code.
    """
    folder = Path(config.output_dir)
    script, (pod, pods) = load_script(folder), place()

    def lost(message: str) -> None:
        """The group dies as a whole, wherever the main thread is."""
        logger.error(message)
        write_error(RunPaths(folder).logs(attempt, "trainer"), "trainer", RoleError(message))
        os._exit(exit_codes.FAILURE)

    if pod:

        def take_part(step: int) -> None:
            happen(script.trainer.faults, attempt=attempt, step=step, pod=pod)

        follow(attempt, pod, *master(), take_part)
        return exit_codes.OK
    port = master()[1] if pods > 1 else 0
    group = Leader(attempt, pods, port, lost)
    return _Trainer(config, attempt, api_key, script, group).run()
