"""The trainer's loop, the same on every rank.

    start    choose the base checkpoint, write the attempt's file, load, publish the base version
    step n   wait for batch n -> train -> publish version n -> save a checkpoint when it is due
    end      tell the orchestrator, wait until it says that all is done
    stop     asked by a signal, all ranks leave together: between two micro-batches, while they wait, or at the end of what they write;
             then the last finished step is saved

Rank 0 alone talks to the orchestrator and owns attempt file, manifests and retention; what the others need of it comes by broadcast.
"""

from __future__ import annotations

import json
import math
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from loguru import logger
from torch import nn

from rlrun.algorithms import Objective
from rlrun.config.roles import TrainerConfig
from rlrun.protocol import exit_codes
from rlrun.protocol.attempts import Attempt, read_attempt
from rlrun.protocol.batch import Batch, Validation
from rlrun.protocol.channel import Phase
from rlrun.protocol.durable import write_bytes
from rlrun.protocol.failures import RoleError, storage_errors
from rlrun.protocol.packing import Row, plan
from rlrun.protocol.paths import RunPaths
from rlrun.trainer import checkpoint, export, lora, publish, resume, versions
from rlrun.trainer.channel import Channel
from rlrun.trainer.checkpoint import POLICY, Part, Progress, seed_step
from rlrun.trainer.completion import Completer
from rlrun.trainer.critic import CRITIC
from rlrun.trainer.feed import TICK_SECONDS, Feed, LiveFeed, ReplayFeed, read_checked, wait_for_batch
from rlrun.trainer.flops import model_cost, peak_flops
from rlrun.trainer.group import Group, process_group
from rlrun.trainer.learner import make_learner
from rlrun.trainer.loading import load_sharded
from rlrun.trainer.model import Memory, check_source
from rlrun.trainer.optimizers import make_optimizer
from rlrun.trainer.saving import Saver, Written
from rlrun.trainer.schedule import learning_rate
from rlrun.trainer.step import objective, parameter_checksum
from rlrun.trainer.stopping import Stop, StopAgreed
from rlrun.trainer.updates import Update, mini_batches
from rlrun.trainer.validation import validate

SHUTDOWN_SECONDS = 7200.0
"""Longest wait for the orchestrator's last evaluation and its `shutdown` after the last step."""
COMPLETION_SECONDS = 600.0
"""Longest wait for the manifest of the last checkpoint once nothing else is left to do."""


def run(
    config: TrainerConfig,
    *,
    attempt: int,
    api_key: str,
    replay: Path | None = None,
    config_hash: str = "",
    stop: Stop | None = None,
) -> int:
    """Train to the last step.

    Args:
        config: the role's resolved configuration.
        attempt: this attempt's number, new in the run's folder.
        api_key: guards the channel to the orchestrator.
        replay: train on the recorded batches of this folder; there is no orchestrator then.
        config_hash: of the run's configuration, kept in attempt file and manifests.
        stop: what signals ask; None: nobody asks.

    Returns:
        The exit code: 0, or 128 + n when signal n ended the run early.

    Raises:
        RoleError: what went wrong, for a person, with the exit code.
    """
    loss = objective(config.algorithm, config.seq_len)
    with process_group(config.gpus_per_replica, config.parallelism) as group:
        return _Trainer(config, attempt, api_key, replay, config_hash, loss, group, stop or Stop()).run()


class _Trainer:
    """State of one rank's loop. What only rank 0 has is None elsewhere."""

    def __init__(
        self,
        config: TrainerConfig,
        attempt: int,
        api_key: str,
        replay: Path | None,
        config_hash: str,
        loss: Objective,
        group: Group,
        stop: Stop,
    ) -> None:
        self.config, self.replay, self.loss, self.group, self.stop = config, replay, loss, group, stop
        self.paths = RunPaths(Path(config.output_dir))
        self.number = attempt
        self.ends = False
        """Whether the data ends with the step that is being trained."""
        self.channel: Channel | None = None
        self.feed: Feed | None = None
        self.completer: Completer | None = None
        if group.leads:
            self._open_channel(api_key)
        self.attempt = self._begin_attempt(config_hash)
        self.source = source = self._source()
        # A checkpoint holds what is trained: the weights that adapters leave as they are come from the model.
        begins = self.attempt.base_step == 0 and self.attempt.origin is None
        self.model = load_sharded(
            config.model,
            source,
            group,
            with_weights=config.lora is not None or begins,
            memory=Memory.of(config),
            kernel=config.attention,
            prepare=self._prepare,
        )
        lora.initialise(self.model, config.seed)
        self.files = publish.model_files(self.model, config.model, source)
        self.optimizer = make_optimizer(self.model, config.optimizer, group.device)
        self.saved_step = self.attempt.base_step
        """The last step whose checkpoint was begun."""
        self.learner = make_learner(config, self.model, self.optimizer, loss, source=source, group=group)
        self.parts = {POLICY: Part(self.model, self.optimizer)}
        if self.learner.critic is not None:
            self.parts[CRITIC] = Part(self.learner.critic.module, self.learner.critic.optimizer)
        self.progress = Progress()
        self.saver = Saver(self.parts, group, background=config.checkpoint.save_async)
        self._load()
        if group.leads:
            self._start_completer()

    def _prepare(self, model: nn.Module) -> None:
        self.cost = model_cost(model)
        if self.config.lora is not None:
            lora.inject(model, self.config.lora)

    def _open_channel(self, api_key: str) -> None:
        if self.replay is not None:
            self.feed = ReplayFeed(self.replay)
            return
        self.channel = Channel(
            attempt=self.number,
            api_key=api_key,
            host=self.config.host,
            port=self.config.port,
            batch_path=lambda step: self.paths.batch(step, self.number),
        )
        self.feed = LiveFeed(self.channel)

    def _begin_attempt(self, config_hash: str) -> Attempt:
        """Rank 0 decides and writes; the others read what it wrote."""
        if self.group.leads:
            with storage_errors(self.paths.attempts, "write the attempt's file"):
                base = resume.choose_base(
                    self.paths,
                    self.config.checkpoint.resume,
                    with_orchestrator=self.replay is None,
                    log=logger.warning,
                )
                origin = None
                if base is None:
                    origin = resume.choose_origin(self.paths, self.config.checkpoint.resume, log=logger.warning)
                begun = resume.begin_attempt(
                    self.paths,
                    base,
                    origin=origin,
                    attempt=self.number,
                    world_size=self.group.world_size,
                    config_hash=config_hash,
                    uid=self.config.uid,
                )
            start = "the model" if base is None else f"the checkpoint {base.checkpoint.path.name}"
            if origin is not None:
                start = f"another run's checkpoint {origin.path}"
            logger.info(
                f"attempt {self.number}: {self.group.world_size} ranks ({self.group.dims}) on {self.group.device.type}, from {start}"
            )
            if self.replay is not None:
                self._cut_metrics(begun.base_step)
        self.group.barrier()
        return read_attempt(self.paths.attempt_file(self.number))

    def _source(self) -> str:
        """Where the model comes from; the tiny one is made when nobody has made it yet."""
        config = self.config.model
        source = config.source(self.paths.model)
        if self.group.leads:
            if config.tiny is not None and not (self.paths.model / "config.json").exists():
                from rlrun.trainer.tiny_model import make_tiny_model

                try:
                    with storage_errors(self.paths.root, "make the tiny model"):
                        make_tiny_model(self.paths.model, config.tiny)
                except ValueError as error:
                    raise RoleError(f"model.tiny: {error}", exit_codes.CONFIGURATION) from error
            check_source(config, source)
        self.group.barrier()
        return source

    def _load(self) -> None:
        attempt, say = self.attempt, logger.warning if self.group.leads else None
        if attempt.base_attempt is not None:
            base = self.paths.checkpoint(attempt.base_step, attempt.base_attempt)
            self.progress = checkpoint.load(self.parts, base, say=say)
        elif attempt.origin is not None:
            checkpoint.load(self.parts, Path(attempt.origin.path), say=say)  # the progress is the other run's

    def _start_completer(self) -> None:
        channel = self.channel

        def completed(step: int, path: Path) -> None:
            logger.info(f"step {step}: the checkpoint is complete")
            if channel is not None:
                channel.emit("checkpoint_complete", step, path=path)

        self.completer = Completer(
            self.paths,
            self.attempt,
            self.config.checkpoint,
            with_orchestrator=channel is not None,
            on_complete=completed,
        )
        if channel is not None:
            channel.agreed = self.completer.agreed

    def run(self) -> int:
        """All steps; returns the exit code."""
        with ExitStack() as stack:
            if self.channel is not None:
                stack.callback(self.channel.close)
                self.channel.begin(self.attempt.base_step)
            try:
                self._run()
            except StopAgreed:
                return self._save_and_end()
        return exit_codes.OK

    def _run(self) -> None:
        if self.config.task == "RL":
            self._publish()
        self.stop.allow_time(self.config.checkpoint.grace_period_seconds, self.group.neighbours())
        while self.progress.step < self.config.max_steps and not self.ends:
            if not self._step(self.progress.step + 1):
                logger.info("the orchestrator says that all is done")
                break
        else:
            logger.info(f"all {self.progress.step} steps are trained")
        self._finish()

    def _step(self, step: int) -> bool:
        began = time.perf_counter()
        self._phase("waiting_for_batch")
        path = wait_for_batch(self.feed, step, self.group, self._check_checkpoints, self._agree_to_stop)
        if path is None:
            return False
        arrived = time.perf_counter()
        batch = self._read(path, step, written_by=self.number if self.replay is None else None)
        self.ends = self.ends or batch.last
        validation = batch.validation if self.replay is None else None
        if validation is not None and validation.before:
            before = self._validate(validation)
            if self.channel is not None:
                self.channel.emit("validated", step - 1, metrics=before)
        self._phase("training")
        metrics = self._train(step, batch)
        self.progress.step = step
        skipped = int(metrics.pop("skipped"))
        self.progress.skipped_steps += skipped
        if skipped and self.group.leads:
            logger.warning(f"step {step}: the gradient is not finite; nothing is updated")
        metrics["skipped_steps"] = float(self.progress.skipped_steps)
        metrics["param_checksum"] = parameter_checksum(self.model)
        metrics["time/wait_for_batch"] = arrived - began
        if validation is not None and validation.after:
            metrics |= self._validate(validation)
        metrics["time/broadcast_weights"] = self._publish() if self._publication_due(step) else 0.0
        due = self._checkpoint_due(step)
        metrics["time/save_ckpt"] = self._save() if due else 0.0
        if (written := self.saver.finished()) is not None:
            metrics["time/write_ckpt"] = written.seconds
        metrics["time/step"] = time.perf_counter() - began
        self._report(step, metrics)
        if due:
            self.saver.then(self._written)  # after the report: the orchestrator expects `trained` first
        return True

    def _read(self, path: Path, step: int, *, written_by: int | None) -> Batch:
        return read_checked(
            path,
            step=step,
            vocabulary=self.model.config.get_text_config().vocab_size,
            seq_len=self.config.seq_len,
            attempt=written_by,
        )

    def _rows(self, batch: Batch) -> tuple[Row, ...]:
        """This rank's micro-batches."""
        lengths = [len(sample) for sample in batch.samples]
        return plan(
            lengths,
            row_tokens=max(self.config.micro_batch_tokens or self.config.seq_len, *lengths),
            ranks=self.group.data_size,
            quadratic=self.cost.quadratic,
        ).ranks[self.group.data_rank]

    def _validate(self, validation: Validation) -> dict[str, float]:
        """Measure the policy as it is on the held-out samples."""
        self._phase("validating")
        # Step 0 is of no policy's, so neither who sampled its tokens nor who wrote them is checked.
        held_out = self._read(Path(validation.path), 0, written_by=None)
        return validate(self.model, held_out, self._rows(held_out), group=self.group)

    def _train(self, step: int, batch: Batch) -> dict[str, float]:
        config = self.config
        parts = mini_batches(batch, config.updates_per_step, seed=config.seed)
        updates = [Update(part, self._rows(part)) for part in parts]
        seed_step(config.seed, step)
        total, critic = min(batch.total_steps or config.max_steps, config.max_steps), config.algorithm.critic
        metrics = self.learner.step(
            updates,
            lr=learning_rate(config.scheduler, config.optimizer.lr, step, total),
            critic_lr=0.0 if critic is None else learning_rate(config.scheduler, critic.lr, step, total),
            agree=self._agree_to_stop,
        )
        metrics["tokens"] = float(batch.tokens)
        seconds = metrics["time/forward_backward"] + metrics["time/optimizer"]
        return metrics | self._performance([len(sample) for part in parts for sample in part.samples], seconds)

    def _performance(self, lengths: list[int], seconds: float) -> dict[str, float]:
        """Throughput in tokens/s over the time of forward, backward and optimizer; MFU and memory (bytes) on CUDA."""
        performance = {"perf/throughput": sum(lengths) / seconds}
        if self.group.device.type == "cuda":
            performance["perf/peak_memory"] = float(torch.cuda.max_memory_allocated(self.group.device))
            torch.cuda.reset_peak_memory_stats(self.group.device)
            peak = peak_flops(torch.cuda.get_device_name(self.group.device))
            if peak is not None:
                performance["perf/mfu"] = self.cost.of(lengths) / seconds / (peak * self.group.world_size)
        return performance

    def _publish(self) -> float:
        """Publish the parameters as they are; returns seconds."""
        with self._timed("publishing") as timer:
            step = self.progress.step
            path = self.paths.version(step, self.number)
            dtype, adapters = self.config.model.dtype, self.config.lora
            exports = step > self.attempt.base_step and self._export_due(step)
            if adapters is not None and adapters.served_as_adapter:
                about = lora.adapter_config(self.model, adapters, self.source)
                publish.publish_adapter(self.model, path, config=about, dtype=dtype, group=self.group)
                if exports:  # an export is a whole model
                    output = self.paths.export(step, self.number)
                    publish.publish(self.model, output, files=self.files, dtype=dtype, group=self.group)
            else:
                publish.publish(self.model, path, files=self.files, dtype=dtype, group=self.group)
                if exports and self.group.leads:
                    export.export_version(path, self.paths.export(step, self.number))
            if self.group.leads:
                if self.channel is not None:
                    self.channel.emit("published", step, path=path)
                versions.delete_superfluous(
                    self.paths, attempt=self.attempt, max_async_level=self.config.algorithm.max_async_level
                )
        return timer[0]

    def _is_last(self, step: int) -> bool:
        return self.ends or step == self.config.max_steps

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
            self.saver.save(self.progress, self.paths.checkpoint(self.progress.step, self.number))
            self.saved_step = self.progress.step
        return timer[0]

    def _written(self, written: Written) -> None:
        """All ranks' shards are durable: on rank 0 the rest of the checkpoint follows. Called in the saver's thread."""
        if self.channel is not None:
            self.channel.emit("checkpoint_saved", written.step, path=written.path)
        if self.completer is not None:
            self.completer.saved(written.step, written.path)

    def _report(self, step: int, metrics: dict[str, float]) -> None:
        if not self.group.leads:
            return
        logger.info(
            f"step {step}/{self.config.max_steps}: loss {metrics['loss']:.4g}, grad_norm {metrics['grad_norm']:.4g}, "
            f"lr {metrics['lr']:.3g}, {metrics['perf/throughput']:.0f} tokens/s, step {metrics['time/step']:.2f} s, "
            f"waited {metrics['time/wait_for_batch']:.2f} s"
        )
        if self.replay is not None:
            finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
            line = json.dumps({"step": step, "attempt": self.number, **finite})
            with storage_errors(self.paths.root, "write metrics"), self.paths.metrics.open("a") as file:
                file.write(line + "\n")
        if self.channel is not None:
            self.channel.emit("trained", step, metrics=metrics)

    def _cut_metrics(self, base_step: int) -> None:
        """In a replay this process owns `metrics.jsonl`: drop the steps that are trained again."""
        if self.paths.metrics.is_file():
            lines = self.paths.metrics.read_text().splitlines()
            kept = [line for line in lines if json.loads(line)["step"] <= base_step]
            write_bytes(self.paths.metrics, "".join(line + "\n" for line in kept).encode())

    def _finish(self) -> None:
        """Wait for the orchestrator's last word, and for the last manifest."""
        self._phase("finished")
        self.saver.wait()
        self.saver.check()
        if self.channel is not None:
            self.channel.emit("finished", self.progress.step)
        deadline = time.monotonic() + SHUTDOWN_SECONDS
        over = False
        while not over:
            if self.channel is not None:
                self._check_checkpoints()
                if time.monotonic() > deadline:
                    raise RoleError(
                        f"the orchestrator has not ended the run within {SHUTDOWN_SECONDS:.0f} s after the last step",
                        exit_codes.FAILURE,
                    )
                over = self.channel.shutdown.wait(TICK_SECONDS)
            self._agree_to_stop()
            over = self.group.broadcast(over or (self.replay is not None))
        if self.completer is not None and not self.completer.close(COMPLETION_SECONDS):
            raise RoleError(
                f"the last checkpoint was not completed within {COMPLETION_SECONDS:.0f} s", exit_codes.FAILURE
            )
        self._check_checkpoints()
        self.group.barrier()

    def _agree_to_stop(self) -> None:
        """Raise `StopAgreed` on all ranks as soon as one was asked to stop; all of them call this together.

        No rank ever leaves on its own: the others would wait for it in their next collective.
        """
        if self.group.maxima({"stop": float(self.stop.asked)})["stop"]:
            self.stop.join()
            raise StopAgreed

    def _save_and_end(self) -> int:
        """Make the checkpoint of the last finished step complete; returns the exit code."""
        step = self.progress.step
        self._phase("saving")
        self.saver.wait()
        self.saver.check()
        if self.config.checkpoint.enabled and step > self.saved_step and self.group.broadcast(self._can_complete()):
            self._save()
            self.saver.then(self._written)
            self.saver.wait()
            self.saver.check()
        complete = step == self.attempt.base_step
        if self.completer is not None and self.saved_step == step > self.attempt.base_step:
            complete = self.completer.wait_for(step, worth=self._can_complete)
        self.group.barrier()  # rank 0 is the one that waits for the manifest
        if self.group.leads:
            after = f"stopped by {signal.Signals(self.stop.number).name} after step {step}"
            logger.info(after if complete else f"{after}, without a complete checkpoint of it")
        return self.stop.exit_code

    def _can_complete(self) -> bool:
        return self.channel is None or self.channel.has_client()

    def _check_checkpoints(self) -> None:
        self.saver.check()
        if self.completer is not None and self.completer.failure is not None:
            raise self.completer.failure

    def _phase(self, phase: Phase) -> None:
        if self.channel is not None:
            self.channel.phase(phase)

    @contextmanager
    def _timed(self, phase: Phase) -> Iterator[list[float]]:
        """Seconds that the block took, as the only element of a list once it has ended."""
        self._phase(phase)
        elapsed: list[float] = []
        began = time.perf_counter()
        yield elapsed
        elapsed.append(time.perf_counter() - began)
