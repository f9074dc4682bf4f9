"""Packed sequences never see each other."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from rlrun.config.parallel import AttentionKernel
from rlrun.trainer.attention import implementation, layout

LENGTHS = [5, 17, 3, 9, 1, 16]


@pytest.mark.parametrize(("family", "kernel"), [("llama", "auto"), ("qwen3", "auto"), ("qwen3", "sdpa")])
def test_packed_and_unpacked_logits_agree(
    family: str, kernel: AttentionKernel, make_model: Callable[..., nn.Module]
) -> None:
    packed, alone = make_model(family, attn=implementation(kernel)), make_model(family, attn="eager")
    ids = torch.randint(0, 50, (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(1))
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    row = layout(LENGTHS, torch.device("cpu"))
    together = packed(input_ids=ids, position_ids=positions, packed=row, use_cache=False).logits[0]
    separate = torch.cat([alone(input_ids=part, use_cache=False).logits[0] for part in ids.split(LENGTHS, 1)])
    torch.testing.assert_close(together, separate, atol=1e-6, rtol=1e-5)


def test_gradients_stay_within_a_sequence(make_model: Callable[..., nn.Module]) -> None:
    model = make_model()
    embedded = torch.randn(1, 12, 32, requires_grad=True)
    positions = torch.cat([torch.arange(5), torch.arange(7)])[None]
    row = layout([5, 7], torch.device("cpu"))
    logits = model(inputs_embeds=embedded, position_ids=positions, packed=row, use_cache=False).logits[0]
    logits[8].sum().backward()
    touched = embedded.grad[0].abs().sum(-1) > 0
    assert touched.tolist() == [False] * 5 + [True] * 4 + [False] * 3


def test_work_follows_the_sequences_and_not_the_row() -> None:
    lengths = [1000] + [10] * 200
    blocks = layout(lengths, torch.device("cpu")).blocks
    work = sum(block.gather.shape[0] * block.gather.shape[1] ** 2 for block in blocks)
    assert work <= 4 * sum(length**2 for length in lengths)
