"""Work of one run on a batch: read it, deal it out, train on it or measure it."""

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
    """Computes one run's steps; the policy has to hold this run's values. The same on every rank."""

    def __init__(self, config: TrainerConfig, policy: Policy, learner: Learner) -> None:
        self._config, self._policy, self._learner, self._group = config, policy, learner, policy.group

    def read(self, path: Path, step: int, *, written_by: int | None) -> Batch:
        """The batch of a step.

        Raises:
            RoleError: it cannot be trained on; says why.
        """
        return read_checked(
            path,
            step=step,
            vocabulary=self._policy.vocabulary,
            seq_len=self._config.seq_len,
            attempt=written_by,
        )

    def validate(self, validation: Validation) -> dict[str, float]:
        """Measure the policy as it is on the held-out samples."""
        # Step 0 is of no policy's, so neither who sampled its tokens nor who wrote them is checked.
        held_out = self.read(Path(validation.path), 0, written_by=None)
        return validate_batch(self._policy.module, held_out, self._rows(held_out), group=self._group)

    def updates(self, batch: Batch) -> list[Update]:
        """The updates of a step, with this rank's rows."""
        parts = mini_batches(batch, self._config.updates_per_step, seed=self._config.seed)
        return [Update(part, self._rows(part)) for part in parts]

    def train(self, step: int, batch: Batch, agree: Callable[[], None]) -> dict[str, float]:
        """All updates of a step; returns its metrics."""
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
        """This rank's micro-batches."""
        lengths = [len(sample) for sample in batch.samples]
        return plan(
            lengths,
            row_tokens=max(self._config.micro_batch_tokens or self._config.seq_len, *lengths),
            ranks=self._group.data_size,
            quadratic=self._policy.cost.quadratic,
        ).ranks[self._group.data_rank]

    def _performance(self, lengths: list[int], seconds: float) -> dict[str, float]:
        """Throughput in tokens/s over the time of forward, backward and optimizer; MFU and memory (bytes) on CUDA."""
        performance, device = {"perf/throughput": sum(lengths) / seconds}, self._group.device
        if device.type == "cuda":
            performance["perf/peak_memory"] = float(torch.cuda.max_memory_allocated(device))
            torch.cuda.reset_peak_memory_stats(device)
            peak = peak_flops(torch.cuda.get_device_name(device))
            if peak is not None:
                performance["perf/mfu"] = self._policy.cost.of(lengths) / seconds / (peak * self._group.world_size)
        return performance
