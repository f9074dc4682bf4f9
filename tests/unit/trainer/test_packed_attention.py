"""Packed sequences never see each other."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from rlrun.config.parallel import AttentionKernel
from rlrun.protocol.failures import RoleError
from rlrun.trainer.attention import implementation, layout, packed_attention

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


@pytest.mark.parametrize(
    ("attention", "told"),
    [
        ({"sliding_window": 4}, r"a sliding window \(4\).*set seqLen to at most 4"),
        ({"softcap": 50.0}, r"soft-capped attention \(50.0\).*another model"),
    ],
)
def test_attention_that_is_not_computed_is_refused(attention: dict[str, float], told: str) -> None:
    query = torch.zeros(1, 2, 8, 4)
    with pytest.raises(RoleError, match=told):
        packed_attention(nn.Identity(), query, query, query, None, packed=layout([3, 5], query.device), **attention)
    # No query looks further back than its sequence's first token: a window as long as the longest sequence changes nothing.
    row = layout([4, 4], query.device)
    assert packed_attention(nn.Identity(), query, query, query, None, packed=row, sliding_window=4)[0].shape == (
        1,
        8,
        2,
        4,
    )
