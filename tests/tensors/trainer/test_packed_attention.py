"""Separation of packed sequences in attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from rlrun.config.models.parallel import AttentionKernel
from rlrun.protocol.files.failures import RoleError
from rlrun.trainer.modeling.packed_attention import implementation_name, packed_attention, row_layout

LENGTHS = [5, 17, 3, 9, 1, 16]


@pytest.mark.parametrize(("family", "kernel"), [("llama", "auto"), ("qwen3", "auto"), ("qwen3", "sdpa")])
def test_packed_and_unpacked_logits_agree(
    family: str, kernel: AttentionKernel, make_model: Callable[..., nn.Module]
) -> None:
    packed, alone = make_model(family, attn=implementation_name(kernel)), make_model(family, attn="eager")
    ids = torch.randint(0, 50, (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(1))
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    row = row_layout(LENGTHS, torch.device("cpu"))
    together = packed(input_ids=ids, position_ids=positions, packed=row, use_cache=False).logits[0]
    separate = torch.cat([alone(input_ids=part, use_cache=False).logits[0] for part in ids.split(LENGTHS, 1)])
    torch.testing.assert_close(together, separate, atol=1e-6, rtol=1e-5)


def test_gradients_stay_within_a_sequence(make_model: Callable[..., nn.Module]) -> None:
    model = make_model()
    embedded = torch.randn(1, 12, 32, requires_grad=True)
    positions = torch.cat([torch.arange(5), torch.arange(7)])[None]
    row = row_layout([5, 7], torch.device("cpu"))
    logits = model(inputs_embeds=embedded, position_ids=positions, packed=row, use_cache=False).logits[0]
    logits[8].sum().backward()
    touched = embedded.grad[0].abs().sum(-1) > 0
    assert touched.tolist() == [False] * 5 + [True] * 4 + [False] * 3


def test_attention_work_follows_sequence_lengths() -> None:
    lengths = [1000] + [10] * 200
    blocks = row_layout(lengths, torch.device("cpu")).segments.blocks or ()
    assert blocks
    work = sum(block.gather.shape[0] * block.gather.shape[1] ** 2 for block in blocks)
    assert work <= 4 * sum(length**2 for length in lengths)


@pytest.mark.parametrize("window", [1, 4, 17, 40])
def test_sliding_window_limits_each_query(window: int) -> None:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(1, 4, sum(LENGTHS), 8, generator=generator)
    key, value = (torch.randn(1, 2, sum(LENGTHS), 8, generator=generator) for _ in range(2))
    row = row_layout(LENGTHS, query.device)
    found, _ = packed_attention(nn.Identity(), query, key, value, None, packed=row, sliding_window=window)
    start = 0
    for length in LENGTHS:
        part = slice(start, start + length)
        q, k, v = query[0, :, part], key[0, :, part].repeat_interleave(2, 0), value[0, :, part].repeat_interleave(2, 0)
        scores = q @ k.transpose(1, 2) / 8**0.5
        behind = torch.arange(length)[:, None] - torch.arange(length)[None]
        scores = scores.masked_fill((behind < 0) | (behind >= window), -torch.inf)
        torch.testing.assert_close(found[0, part], (scores.softmax(-1) @ v).transpose(0, 1), atol=1e-6, rtol=1e-5)
        start += length


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"alibi": 50.0}, r"Identity.*alibi \(50.0\)"),
        ({"bias": torch.zeros(2)}, "bias"),
        ({"dropout": 0.1}, r"dropout \(0.1\)"),
        ({"is_causal": False}, r"is_causal \(False\)"),
        ({"something_new": 3, "position_ids": None}, r"has something_new \(3\), which"),
        ({"attention_mask": torch.zeros(8, 8)}, "attention_mask"),
    ],
)
def test_unsupported_attention_option_is_refused(options: dict[str, Any], told: str) -> None:
    query = torch.zeros(1, 2, 8, 4)
    mask = options.pop("attention_mask", None)
    with pytest.raises(RoleError, match=told):
        packed_attention(nn.Identity(), query, query, query, mask, packed=row_layout([3, 5], query.device), **options)


def test_attention_options_without_effect_are_accepted() -> None:
    query = torch.randn(1, 2, 8, 4, generator=torch.Generator().manual_seed(0))
    row = row_layout([3, 5], query.device)
    options = {"softcap": None, "dropout": 0.0, "is_causal": True, "position_ids": query, "output_attentions": False}
    found, _ = packed_attention(nn.Identity(), query, query, query, None, packed=row, **options)
    assert torch.equal(found, packed_attention(nn.Identity(), query, query, query, None, packed=row)[0])


def test_layers_that_drop_the_row_layout_are_refused() -> None:
    query = torch.zeros(1, 2, 8, 4)
    with pytest.raises(RoleError, match=r"do not pass the row's layout to their attention \(Identity\)"):
        packed_attention(nn.Identity(), query, query, query, None)
