"""State and work of one run in the trainer, from its first version to its last checkpoint. Every rank runs the same code.

    join     set the adapters, load the base checkpoint, publish the base version
    step n   train on batch n -> publish version n -> save a checkpoint when it is due
    finish   report to the orchestrator, wait for its shutdown request
    leave    save the last finished step, with the orchestrator's part if it exists

A trainer has one run, or several that take turns (`loop`). Only rank 0 communicates with the orchestrator and writes manifests and
retention; its objects are None on other ranks.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Literal

from loguru import logger

from rlrun.algorithms import Mixture
from rlrun.config.models.roles import TrainerConfig
from rlrun.diagnostics.fault_points import reach
from rlrun.protocol.files.attempts import Attempt
from rlrun.protocol.files.failures import RoleError
from rlrun.protocol.files.paths import RunPaths
from rlrun.protocol.files.volume_faults import Volume
from rlrun.protocol.messages.trainer_channel import Phase
from rlrun.runtime import exit_codes
from rlrun.trainer.checkpoints.checkpoint_manager import CheckpointManager
from rlrun.trainer.checkpoints.dcp import POLICY, Part
from rlrun.trainer.checkpoints.unsaved import Refused
from rlrun.trainer.engines_beside import EnginesBeside
from rlrun.trainer.gpu_memory import GPUMemory
from rlrun.trainer.learning.batch_step import Steps
from rlrun.trainer.learning.critic import CRITIC
from rlrun.trainer.learning.learner import Learner, make_learner
from rlrun.trainer.learning.optimizers import make_optimizer
from rlrun.trainer.learning.reference_model import FrozenReference
from rlrun.trainer.learning.train_step import parameter_checksum
from rlrun.trainer.modeling import lora
from rlrun.trainer.process import Link, SharedObjects
from rlrun.trainer.proof.start_check import check_model
from rlrun.trainer.ranks.start_clock import StartClock
from rlrun.trainer.run_report import RunReport, append_line
from rlrun.trainer.weights.publisher import Publisher

SHUTDOWN_SECONDS = 7200.0
"""Longest wait for the orchestrator's last evaluation and its `shutdown` after the last step."""


def _ignore_message(message: str) -> None:
    """Ignore a message on ranks other than 0, because rank 0 reports for all."""


class Run:
    """State of one run in training.

    Args:
        config: configuration of the run.
        attempt: attempt that has started.
        objective: training objective, with the run's options bound.
        process: shared objects of the process; its policy gets the run's parameters.
        link: connection to the run's orchestrator.
        output_dir: folder of the run.
        label: prefix of log lines; empty for the host.

    Raises:
        RoleError: a reference model, a critic or a checkpoint cannot be loaded.
    """

    def __init__(
        self,
        config: TrainerConfig,
        attempt: Attempt,
        objective: Mixture,
        process: SharedObjects,
        link: Link,
        *,
        output_dir: Path,
        label: str = "",
    ) -> None:
        policy, channel = process.policy, link.channel
        self.config, self.attempt, self.number = config, attempt, attempt.attempt
        self.paths = RunPaths(output_dir)
        self.channel, self.feed, self._replay = channel, link.feed, link.replay
        self.stage: Literal["training", "finished", "leaving"] = "training"
        self._policy, self._group, self._check_stop = policy, policy.group, process.check_stop
        self._report = RunReport(channel, process.report_phase, label=label, leads=self._group.leads)
        self._deadline = math.inf
        self._is_data_ended = False
        """The current step is the last one of the data."""
        self._since = time.perf_counter()
        """End of the previous step, in seconds of `time.perf_counter`."""
        self._arrived: float | None = None
        """Arrival of the next batch on rank 0, in seconds of `time.perf_counter`."""
        self.clock = StartClock()
        """Durations of this run's start; the host uses the process's clock (`loop.train_runs`)."""
        # Runs share one module. From here on it contains the adapters of this run, which optimizer
        # and checkpoint then refer to.
        policy.adapters.load_run(config.name, config.lora)
        lora.initialize_adapters(policy.module, config.seed)
        optimizer = make_optimizer(policy.module, config.optimizer, self._group.device)
        learner = make_learner(
            config, policy.module, optimizer, objective, source=policy.source, group=self._group, check=check_model
        )
        self._steps = Steps(config, policy, learner)
        self._memory = None if process.engines is None else _run_memory(learner, process.engines, config)
        self._volume = Volume(self.paths.root, say=logger.warning if self._group.leads else _ignore_message)
        with ExitStack() as made:  # if a guest cannot join, its threads and process groups must end
            made.callback(self._volume.close)
            # After the learner: the base checkpoint is loaded into the module and the optimizer's
            # state.
            self._checkpoints = self._open_checkpoints(learner)
            made.callback(self._checkpoints.close, wait=False)
            self.progress = self._checkpoints.base
            self._publisher = self._open_publisher(process, link)
            made.pop_all()
        self.clock.end_phase("checkpoint")

    def _open_checkpoints(self, learner: Learner) -> CheckpointManager:
        if self._group.leads:
            self._volume.watch()
        if self.channel is not None:
            # The channel's thread answers while this thread waits for the volume, so users see the
            # cause of the wait.
            self.channel.trouble = self._volume.trouble
        return CheckpointManager(
            self.config,
            self.attempt,
            trained_parts(learner),
            paths=self.paths,
            group=self._group,
            channel=self.channel,
            volume=self._volume,
            say=self._report.log_line,
        )

    def _open_publisher(self, process: SharedObjects, link: Link) -> Publisher:
        return Publisher(
            self.config,
            self.attempt,
            self._policy,
            paths=self.paths,
            channel=self.channel,
            volume=self._volume,
            check_stop=process.check_stop,
            replay=link.replay,
        )

    @property
    def name(self) -> str:
        """The run's name."""
        return self.config.name

    # ---- rank 0 reads the state

    def find_error(self) -> RoleError | None:
        """Return an error that ends the run between steps: a failed checkpoint, or an orchestrator that did not shut down."""
        if (failure := self._checkpoints.failure()) is not None:
            return failure
        if time.monotonic() > self._deadline and self.stage == "finished":
            return RoleError(
                f"the orchestrator did not end the run within {SHUTDOWN_SECONDS:.0f} s after the last step",
                exit_codes.FAILURE,
            )
        return None

    def is_trained(self) -> bool:
        """Return whether no step remains: all are trained, the data has ended, or the orchestrator ended the run."""
        if self.progress.step >= self.config.max_steps or self._is_data_ended:
            return True
        return self.feed is not None and self.feed.is_exhausted()

    def refused_checkpoint(self) -> Refused | None:
        """Return the last checkpoint if the volume refused it."""
        return self._checkpoints.refused_checkpoint()

    def is_retry_due(self) -> bool:
        """Return whether the last checkpoint was refused and its retry is due."""
        return self.stage != "leaving" and self._checkpoints.is_retry_due(blocks=self.is_trained())

    def has_batch(self) -> bool:
        """Return whether the batch of the next step has arrived."""
        assert self.feed is not None
        found = self.feed.has_batch(self.progress.step + 1)
        if found and self._arrived is None:
            self._arrived = time.perf_counter()
            self.phase("waiting_for_turn")
        return found

    def take_batch(self) -> Path | None:
        """Take the batch of the next step, or return None if it has not arrived."""
        assert self.feed is not None
        return self.feed.take_batch(self.progress.step + 1, 0.0)

    def silent_seconds(self) -> float:
        """Return the seconds since the orchestrator's last request; 0 while it is connected."""
        return (
            0.0 if self.channel is None or self.channel.has_client() else time.monotonic() - self.channel.last_contact
        )

    def has_ended(self) -> bool:
        """Return whether the orchestrator has ended the finished run."""
        return self.channel is None or self.channel.shutdown.is_set()

    def has_left(self) -> bool:
        """Return whether the leaving run has finished its writes, or has exceeded its time limit."""
        return not self._checkpoints.is_pending() or time.monotonic() > self._deadline

    def wait_for_manifest(self) -> RoleError | None:
        """Wait for the last manifest of an ended run; return an error if it is missing."""
        return self._checkpoints.wait_for_manifest()

    # ---- all ranks together

    def publish_base(self) -> None:
        """Publish the base version and accept batches."""
        self._policy.adapters.load_run(self.name, self.config.lora)
        if self.channel is not None:
            self.channel.accept_batches(self.attempt.base_step)
        # Engines hold other weights, or those of an earlier attempt under the same number, until
        # they get the base version.
        if self.config.task == "RL":
            self._publish_version()
        self._release_memory()
        self.clock.end_phase("publish")
        self._wait_for_batch()

    def step(self, path: Path, *, save: bool = False) -> None:
        """Train the next step, publish it and save it if due.

        Args:
            path: folder of the batch.
            save: request for a checkpoint even if none is due.
        """
        step, taken = self.progress.step + 1, time.perf_counter()
        self._policy.adapters.load_run(self.name, self.config.lora)
        # Read the batch before the engines lose the GPUs, so that an invalid batch does not move any memory.
        batch = self._steps.load_batch(path, step, written_by=None if self._replay else self.number)
        if self._memory is not None:
            self._memory.move_to_gpu()
        self._is_data_ended = self._is_data_ended or batch.last
        # The held-out loss before the first update belongs to the previous step.
        validation = None if self._replay else batch.validation
        if validation is not None and validation.before:
            self.phase("validating")
            before = self._steps.held_out_loss(validation)
            if self.channel is not None:
                self.channel.append_event("validated", step - 1, metrics=before)
        # Train. From here on the step counts as done, even if its publication waits for the volume.
        self.phase("training")
        metrics = self._steps.train(step, batch, self._next_part)
        self.progress.step = step
        reach("step.trained")
        # A skipped update still counts as a step: the engines' versions and the batches are
        # numbered by steps.
        skipped = int(metrics.pop("skipped"))
        self.progress.skipped_steps += skipped
        if skipped and self._group.leads:
            logger.warning(f"{self._report.label}step {step}: the gradient is not finite; the update is skipped")
        metrics["skipped_steps"] = float(self.progress.skipped_steps)
        metrics["param_checksum"] = parameter_checksum(self._policy.module)
        # Divide the time before the step into waiting for the batch and waiting for other runs.
        arrived = self._arrived or taken
        metrics["time/wait_for_batch"] = arrived - self._since
        metrics["time/wait_for_turn"] = taken - arrived
        if validation is not None and validation.after:
            self.phase("validating")
            metrics |= self._steps.held_out_loss(validation)
        # Publish before saving, because engines wait for the version.
        metrics["time/broadcast_weights"] = self._publish_version() if self._publication_due(step) else 0.0
        metrics |= self._publisher.metrics()
        # A requested save repeats a refused checkpoint: this step replaces the one that the volume
        # did not take.
        due = self._checkpoint_due(step) or save
        metrics["time/save_ckpt"] = self._start_save() if due else 0.0
        if (seconds := self._checkpoints.seconds()) is not None:
            metrics["time/write_ckpt"] = seconds
        metrics["time/step"] = time.perf_counter() - self._since
        metrics |= self.clock.metrics()
        self._report.report_step(step, self.config.max_steps, metrics)
        if self._replay and self._group.leads:
            append_line(self.paths.metrics, step, self.number, metrics)
        if due:
            self._checkpoints.report_when_durable()  # after the report, because the orchestrator expects the event `trained` first
        self._release_memory()
        self._wait_for_batch()

    def save(self) -> None:
        """Save a checkpoint of the last step once more."""
        self._start_save()
        self._checkpoints.report_when_durable()

    def finish_training(self) -> None:
        """Wait for the files of the last step, then report `finished` and wait for the shutdown.

        If the volume has refused the files, the stage stays `training` and the loop retries.
        """
        step = self.progress.step
        self.phase("finished")
        if not self._checkpoints.wait_for_write():
            self.phase("saving")
            return
        all_trained = step >= self.config.max_steps or self._is_data_ended
        self._report.log_line(f"all {step} steps are trained" if all_trained else "the orchestrator ended the run")
        if self.channel is not None:
            self.channel.append_event("finished", step)
        self.stage, self._deadline = "finished", time.monotonic() + SHUTDOWN_SECONDS

    def start_leaving(self) -> None:
        """Start to save the last finished step, unless it is saved."""
        self.phase("saving")
        self._checkpoints.wait_for_write()
        # Rank 0 decides, because only it knows the refused checkpoints and the connection to the
        # orchestrator. Saving is collective.
        if self._group.broadcast(self._checkpoints.should_save(self.progress.step)):
            self._policy.adapters.load_run(self.name, self.config.lora)
            self.save()
        self.stage = "leaving"
        self._deadline = time.monotonic() + self.config.checkpoint.grace_period_seconds

    def wait_until_complete(self, why: str) -> None:
        """Wait until the checkpoint of `start_leaving` is complete, or cannot become complete.

        Args:
            why: reason for the end of the run, used in the log.
        """
        step = self.progress.step
        complete = self._checkpoints.wait_until_complete(step)
        self._group.barrier()  # only rank 0 waits for the manifest
        if self._group.leads:
            refused = self.refused_checkpoint()
            because = f": {refused.trouble.text}" if refused is not None else ""
            after = f"{why} after step {step}"
            self._report.log_line(after if complete else f"{after}, without a complete checkpoint of it{because}")

    def close(self, *, wait: bool) -> None:
        """Release the run's threads, adapters and process groups, except for its channel.

        Args:
            wait: request to wait for running writes, unless they have failed.
        """
        self._volume.close()
        self._checkpoints.close(wait=wait)
        self._policy.adapters.delete_run(self.name)
        self._publisher.close()

    def _release_memory(self) -> None:
        """Release the GPUs on all ranks, then report it so that the engines can use them."""
        if self._memory is None:
            return
        # The barrier follows on all ranks: an engine that wakes while one rank still holds memory
        # can run out of it.
        self._memory.move_to_host()
        self._group.barrier()
        if self.channel is not None:
            self.channel.append_event("released", self.progress.step)

    def _wait_for_batch(self) -> None:
        self._since, self._arrived = time.perf_counter(), None
        self.phase("waiting_for_batch")

    def _publish_version(self) -> float:
        """Publish the current parameters and return the duration in seconds."""
        with self._measure_phase("publishing") as timer:
            step = self.progress.step
            self._publisher.publish(step, last=self._is_last(step), saved=self._checkpoint_due(step))
        return timer[0]

    def _publication_due(self, step: int) -> bool:
        return self._publisher.is_due(step, last=self._is_last(step), saved=self._checkpoint_due(step))

    def _is_last(self, step: int) -> bool:
        return self._is_data_ended or step == self.config.max_steps

    def _checkpoint_due(self, step: int) -> bool:
        config = self.config.checkpoint
        return config.enabled and (step % config.interval == 0 or self._is_last(step))

    def _start_save(self) -> float:
        """Start to save this rank's shards and return the seconds that the loop was blocked."""
        with self._measure_phase("saving") as timer:
            self._checkpoints.save(self.progress)
        return timer[0]

    def _next_part(self) -> None:
        """Report the next micro-batch, then meet the other ranks.

        The report comes first: a rank that hangs in the previous micro-batch then has a lower number than the others.
        """
        self._report.start_micro_batch(self.progress.step)
        self._check_stop()

    def phase(self, phase: Phase) -> None:
        """Report the phase to the orchestrator and to rank 0."""
        self._report.phase(phase, self.progress.step)

    @contextmanager
    def _measure_phase(self, phase: Phase) -> Iterator[list[float]]:
        """Report a phase and measure the block; the yielded list contains the seconds after the block."""
        self.phase(phase)
        elapsed: list[float] = []
        began = time.perf_counter()
        yield elapsed
        elapsed.append(time.perf_counter() - began)


def trained_parts(learner: Learner) -> dict[str, Part]:
    """Return the trained modules and optimizers by their names in checkpoints."""
    parts = {POLICY: Part(learner.model, learner.optimizer)}
    if learner.critic is not None:
        parts[CRITIC] = Part(learner.critic.module, learner.critic.optimizer)
    return parts


def _run_memory(learner: Learner, engines: EnginesBeside, config: TrainerConfig) -> GPUMemory:
    """Collect the run's modules and optimizers on this rank's GPU."""
    parts = trained_parts(learner).values()
    beside = [learner.reference.model] if isinstance(learner.reference, FrozenReference) else []
    return GPUMemory(
        engines,
        [*(part.module for part in parts), *beside],
        [part.optimizer for part in parts],
        device=learner.group.device,
        stays=config.cpu_offload,
    )
