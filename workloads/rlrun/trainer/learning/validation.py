"""Loss on held-out samples: forward passes over a batch without gradients and updates."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import nn

from rlrun.protocol.files.batch import Batch
from rlrun.protocol.packing.micro_batches import Row
from rlrun.trainer.learning.auxiliary_logprobs import logprobs_without_gradient
from rlrun.trainer.learning.optim.update import read_scalars
from rlrun.trainer.learning.step_buffer import micro_batches
from rlrun.trainer.ranks.group import Group


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
