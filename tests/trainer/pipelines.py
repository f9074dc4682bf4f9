"""Pipeline work in addition to the steps of the grid: passes without gradients, linear losses and versions in buckets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from safetensors.torch import load
from torch import Tensor, nn

from rlrun.algorithms import Mixture, Objective
from rlrun.protocol.files.batch import Batch
from rlrun.protocol.messages.buckets import plan_buckets, root_ranks
from rlrun.protocol.packing.micro_batches import plan_micro_batches
from rlrun.trainer.learning.batch_step import validate_batch
from rlrun.trainer.learning.forward import release_gathered, token_logprobs
from rlrun.trainer.learning.run_objective import Update
from rlrun.trainer.learning.step_buffer import micro_batch
from rlrun.trainer.learning.train_step import train_step
from rlrun.trainer.ranks.group import Group
from rlrun.trainer.weights.bucketing import bucket_layout, gather_buckets


def validation_error(model: nn.Module, whole: nn.Module, batch: Batch, group: Group) -> float:
    """Return the difference between the held-out loss and that of the whole model, which computes all samples
    together.
    """
    row = micro_batch(batch.samples, torch.device("cpu"))
    with torch.no_grad():
        expected = -float((token_logprobs(whole, row) * row.advantages).sum()) / batch.loss_tokens
    lengths = [len(sample) for sample in batch.samples]
    rows = plan_micro_batches(lengths, row_tokens=32, ranks=group.data_size).ranks[group.data_rank]
    found = validate_batch(model, batch, rows, group=group)["validation/loss"]
    release_gathered(model)  # otherwise the root's gathered parameters count as this rank's part
    return abs(found - expected)


def linear_error(model: nn.Module, batch: Batch, group: Group) -> float:
    """Return the effect of an early backward pass of a linear loss; no weight changes.

    There are fewer rows than stages.
    """
    lengths = [len(sample) for sample in batch.samples]
    rows = plan_micro_batches(lengths, row_tokens=256, ranks=group.data_size).ranks[group.data_rank]
    assert len(rows) < group.dims.pp
    supervised = Mixture(Objective("sft"))
    found = []
    for linear in (True, False):
        optimizer = torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=0.0)
        with patch.object(Mixture, "is_linear", linear):
            found.append(
                train_step(
                    model, optimizer, Update(batch, rows), group=group, loss=supervised, lr=0.0, max_grad_norm=None
                )
            )
    return max(abs(found[0][name] - found[1][name]) for name in ("loss", "grad_norm"))


def sent_exact(model: nn.Module, weights: Mapping[str, Tensor], group: Group) -> bool:
    """Whether the roots of all stages together send the bits of the version's files; valid on rank 0."""
    roots = root_ranks(group.world_size)
    buckets = plan_buckets(bucket_layout(model, "float32"), bucket_bytes=20_000, roots=len(roots))
    mine = roots.index(group.rank)
    kept = gather_buckets(model, buckets, dtype="float32", root=mine, pinned=False, roots=roots)
    assert {*kept} == {bucket.index for bucket in buckets if bucket.root == mine}
    all_ranks: list[Any] = [None] * group.world_size
    dist.all_gather_object(all_ranks, kept)
    held = {index: values for one in all_ranks for index, values in one.items()}
    sent: dict[str, Tensor] = {}
    for bucket in buckets:
        sent |= load(bucket.header() + bytes(held[bucket.index].numpy()))
    return sent.keys() == weights.keys() and all(torch.equal(sent[name], weights[name]) for name in sent)
