"""Held-out loss: equal to its definition for every packing, without training."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

from rlrun.protocol.files.batch import Batch, Sample
from rlrun.trainer.learning.batch_step import validate_batch
from rlrun.trainer.learning.train_step import parameter_checksum
from rlrun.trainer.modeling.shard import shard_model
from rlrun.trainer.ranks.group import Group

LENGTHS = [9, 4, 13, 6, 3]


def supervised(sample: Sample, weight: float) -> Sample:
    """Return the sample as the data pipeline builds it."""
    zeros = np.zeros(len(sample), np.float32)
    weights = np.where(sample.loss_mask, weight, 0).astype(np.float32)
    return dataclasses.replace(sample, logprobs=zeros, advantages=weights)


@pytest.mark.parametrize("rows", [[(0, 1, 2, 3, 4)], [(3,), (), (0, 2), (4, 1)]])
def test_validation_loss_is_weighted_negative_log_probability(
    solo: Group, make_model: Callable[..., nn.Module], make_sample: Callable[..., Sample], rows: list[tuple[int, ...]]
) -> None:
    samples = tuple(supervised(make_sample(n, seed=i), 0.5 if i else 1.0) for i, n in enumerate(LENGTHS))
    batch = Batch(0, 1, samples)
    model = shard_model(make_model(), solo)
    before = parameter_checksum(model)
    found = validate_batch(model, batch, rows, group=solo)
    plain = make_model(attn="eager")
    total = 0.0
    for sample in samples:
        ids = torch.from_numpy(sample.input_ids).long()
        with torch.no_grad():
            logprobs = plain(input_ids=ids[None]).logits[0, :-1].double().log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        total -= float((logprobs * torch.from_numpy(sample.advantages)[1:]).sum())
    assert found["validation/loss"] == pytest.approx(total / batch.loss_tokens, rel=1e-5)
    assert found["validation/loss_tokens"] == batch.loss_tokens
    assert parameter_checksum(model) == before
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())


def test_validation_counts_ranks_with_equal_rows_once(
    solo: Group,
    make_model: Callable[..., nn.Module],
    make_sample: Callable[..., Sample],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    batch = Batch(0, 1, (supervised(make_sample(9), 1.0),))
    model = shard_model(make_model(), solo)
    alone = validate_batch(model, batch, [(0,)], group=solo)["validation/loss"]
    # A second rank of the same tensor group, whose share must be excluded.
    monkeypatch.setattr(Group, "data_sums", lambda self, values: dict.fromkeys(values, 0.0))
    assert alone > 0
    assert validate_batch(model, batch, [(0,)], group=solo)["validation/loss"] == 0.0
