"""One run's work on a batch: read it, distribute it over ranks, train on it or validate."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from rlrun.config.models.roles import TrainerConfig
from rlrun.protocol.files.batch import Batch, Validation
from rlrun.protocol.packing.micro_batches import Row, plan
from rlrun.trainer.channel.batch_feed import read_checked
from rlrun.trainer.learning.learner import Learner
from rlrun.trainer.learning.lr_schedule import learning_rate
from rlrun.trainer.learning.minibatches import Update, mini_batches
from rlrun.trainer.learning.seed import seed_step
from rlrun.trainer.learning.validation import validate_batch
from rlrun.trainer.modeling.flops import peak_flops
from rlrun.trainer.modeling.shared_model import Policy


class Steps:
    """Training steps of one run. The policy must contain the run's parameters; every rank runs the same code."""

    def __init__(self, config: TrainerConfig, policy: Policy, learner: Learner) -> None:
        self._config, self._policy, self._learner, self._group = config, policy, learner, policy.group

    def read(self, path: Path, step: int, *, written_by: int | None) -> Batch:
        """Read and check the batch of a step.

        Raises:
            RoleError: the batch is invalid.
        """
        return read_checked(
            path,
            step=step,
            vocabulary=self._policy.vocabulary,
            seq_len=self._config.seq_len,
            attempt=written_by,
        )

    def validate(self, validation: Validation) -> dict[str, float]:
        """Compute the loss of the current policy on the held-out samples."""
        # The held-out samples have step 0 and no sampling policy, so versions and attempt are not checked.
        held_out = self.read(Path(validation.path), 0, written_by=None)
        return validate_batch(self._policy.module, held_out, self._rows(held_out), group=self._group)

    def updates(self, batch: Batch) -> list[Update]:
        """Divide a batch into the updates of a step, with this rank's rows."""
        parts = mini_batches(batch, self._config.updates_per_step, seed=self._config.seed)
        return [Update(part, self._rows(part)) for part in parts]

    def train(self, step: int, batch: Batch, agree: Callable[[], None]) -> dict[str, float]:
        """Run all updates of a step and return its metrics."""
        config = self._config
        updates = self.updates(batch)
        seed_step(config.seed, step)
        total, critic = min(batch.total_steps or config.max_steps, config.max_steps), config.algorithm.critic
        metrics = self._learner.step(
            updates,
            lr=learning_rate(config.scheduler, config.optimizer.lr, step, total),
            critic_lr=0.0 if critic is None else learning_rate(config.scheduler, critic.lr, step, total),
            agree=agree,
        )
        metrics["tokens"] = float(batch.tokens)
        seconds = metrics["time/forward_backward"] + metrics["time/optimizer"]
        return metrics | self._performance(
            [len(sample) for update in updates for sample in update.batch.samples], seconds
        )

    def _rows(self, batch: Batch) -> tuple[Row, ...]:
        """Plan the micro-batches of all ranks and return this rank's."""
        lengths = [len(sample) for sample in batch.samples]
        return plan(
            lengths,
            row_tokens=max(self._config.micro_batch_tokens or self._config.seq_len, *lengths),
            ranks=self._group.data_size,
            quadratic=self._policy.cost.quadratic,
        ).ranks[self._group.data_rank]

    def _performance(self, lengths: list[int], seconds: float) -> dict[str, float]:
        """Compute the throughput in tokens/s of forward, backward and optimizer; on CUDA also MFU and peak memory in bytes."""
        performance, device = {"perf/throughput": sum(lengths) / seconds}, self._group.device
        if device.type == "cuda":
            performance["perf/peak_memory"] = float(torch.cuda.max_memory_allocated(device))
            torch.cuda.reset_peak_memory_stats(device)
            peak = peak_flops(torch.cuda.get_device_name(device))
            if peak is not None:
                performance["perf/mfu"] = (
                    self._policy.cost.total_flops(lengths) / seconds / (peak * self._group.world_size)
                )
        return performance
