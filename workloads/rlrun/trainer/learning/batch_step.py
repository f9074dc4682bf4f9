"""One run's work on a batch: seed the generators, distribute the samples over ranks, train or validate.

The validation computes the loss on held-out samples: forward passes without gradients and updates.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from loguru import logger
from torch import nn

from rlrun.config.models.roles import TrainerConfig
from rlrun.protocol.files.batch import Batch, Validation
from rlrun.protocol.packing.bin_packing import fewest_rows
from rlrun.protocol.packing.micro_batches import Row, plan_micro_batches
from rlrun.trainer.channel.batch_feed import read_checked
from rlrun.trainer.learning.forward import logprobs_without_gradient
from rlrun.trainer.learning.learner import Learner
from rlrun.trainer.learning.lr_schedule import learning_rate
from rlrun.trainer.learning.optim.update import read_scalars
from rlrun.trainer.learning.run_objective import Update, mini_batches
from rlrun.trainer.learning.step_buffer import micro_batches
from rlrun.trainer.modeling.flops import peak_flops
from rlrun.trainer.modeling.router_replay import routing_of
from rlrun.trainer.modeling.shared_model import Policy
from rlrun.trainer.ranks.group import Group


def seed_step(seed: int, step: int) -> None:
    """Seed torch's generators for a step, so that a resumed run draws the same numbers as an uninterrupted one."""
    torch.manual_seed(zlib.crc32(f"{seed}/{step}".encode()))  # the CPU generator uses only 32 bits of the seed


def validate_batch(model: nn.Module, batch: Batch, rows: Sequence[Row], *, group: Group) -> dict[str, float]:
    """Return the mean negative log-probability of a batch's loss tokens in nats, weighted by the advantages like the loss `sft`.

    Args:
        model: policy; dropout is disabled during the computation.
        batch: held-out samples.
        rows: micro-batches of this rank; every rank has the same number.
        group: all ranks; all call this function together.

    Returns:
        `validation/loss`, `validation/loss_tokens` and `time/validate` in seconds, equal on all ranks, except for the time.
    """
    began = time.perf_counter()
    was_training = model.training
    model.eval()
    losses = [torch.zeros((), dtype=torch.float64, device=group.device)]
    inputs = micro_batches([[batch.samples[index] for index in row] for row in rows], group.device)
    logprobs = logprobs_without_gradient(model, inputs)
    losses += [-(one * row.advantages).double().sum() for one, row in zip(logprobs, inputs, strict=True)]
    model.train(was_training)
    total = group.data_sums(read_scalars({"loss": torch.stack(losses).sum()}))["loss"]
    return {
        "validation/loss": total / batch.loss_tokens,
        "validation/loss_tokens": float(batch.loss_tokens),
        "time/validate": time.perf_counter() - began,
    }


class Steps:
    """Training steps of one run. The policy must contain the run's parameters; every rank runs the same code."""

    def __init__(self, config: TrainerConfig, policy: Policy, learner: Learner) -> None:
        self._config, self._policy, self._learner, self._group = config, policy, learner, policy.group
        self._logged_packing = False

    def load_batch(self, path: Path, step: int, *, written_by: int | None) -> Batch:
        """Read and check the batch of a step.

        Raises:
            RoleError: the batch is invalid.
        """
        routing = routing_of(self._policy.module)
        return read_checked(
            path,
            step=step,
            vocabulary=self._policy.vocabulary,
            seq_len=self._config.seq_len,
            attempt=written_by,
            routes=routing.shape if routing is not None and self._learner.router.replay == "Rollout" else None,
        )

    def held_out_loss(self, validation: Validation) -> dict[str, float]:
        """Compute the loss of the current policy on the held-out samples."""
        # The held-out samples have step 0 and no sampling policy, so versions and attempt are not checked.
        held_out = self.load_batch(Path(validation.path), 0, written_by=None)
        return validate_batch(self._policy.module, held_out, self._plan_rows(held_out), group=self._group)

    def divide_batch(self, batch: Batch) -> list[Update]:
        """Divide a batch into the updates of a step, with this rank's rows; the updates of later passes follow those of the first."""
        config = self._config
        updates: list[Update] = []
        for epoch in range(config.epochs_per_step):
            if epoch > 0 and config.updates_per_step == 1:  # the same samples, so the same rows
                updates.append(replace(updates[0], is_repeated=True))
                continue
            parts = mini_batches(batch, config.updates_per_step, seed=config.seed, epoch=epoch)
            updates += [Update(part, self._plan_rows(part), is_repeated=epoch > 0) for part in parts]
        return updates

    def train(self, step: int, batch: Batch, check_stop: Callable[[], None]) -> dict[str, float]:
        """Run all updates of a step and return its metrics."""
        config = self._config
        updates = self.divide_batch(batch)
        seed_step(config.seed, step)
        total, critic = min(batch.total_steps or config.max_steps, config.max_steps), config.algorithm.critic
        metrics = self._learner.step(
            updates,
            lr=learning_rate(config.scheduler, config.optimizer.lr, step, total),
            critic_lr=0.0 if critic is None else learning_rate(config.scheduler, critic.lr, step, total),
            check_stop=check_stop,
        )
        metrics["tokens"] = float(batch.tokens)
        seconds = metrics["time/forward_backward"] + metrics["time/optimizer"]
        # Samples of later passes are computed again, so they count here, but not as tokens of the step.
        return metrics | self._measure_performance(
            [len(sample) for update in updates for sample in update.batch.samples], seconds
        )

    def _plan_rows(self, batch: Batch) -> tuple[Row, ...]:
        """Plan the micro-batches of all ranks and return this rank's."""
        lengths, packing = [len(sample) for sample in batch.samples], self._learner.packing
        row_tokens = max(self._config.micro_batch_tokens or self._config.seq_len, *lengths)
        planned = plan_micro_batches(
            lengths,
            row_tokens=row_tokens,
            ranks=self._group.data_size,
            quadratic=self._policy.cost.quadratic,
            samples_per_row=1 if packing == "alone" else None,
        ).ranks
        if packing != "row" and self._group.leads and not self._logged_packing:
            self._logged_packing = True
            rows = sum(bool(row) for own in planned for row in own)
            shared = (
                ""
                if packing == "mixer"
                else f"; shared rows of {row_tokens} tokens would be {fewest_rows(lengths, row_tokens)}"
            )
            logger.info(
                f"packing {packing}: the first batch has {len(lengths)} sequences in {rows} rows, "
                f"{sum(lengths) / rows:.0f} tokens per row{shared}"
            )
        return planned[self._group.data_rank]

    def _measure_performance(self, lengths: list[int], seconds: float) -> dict[str, float]:
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
