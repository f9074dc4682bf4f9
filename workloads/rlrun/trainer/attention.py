"""Attention over packed rows that never crosses a sequence's boundary, as an attention function of transformers.

A row is `[1, T]` with several sequences end to end. On CUDA torch's variable-length flash attention takes it as it is. Elsewhere the
sequences are regrouped into padded blocks of similar length, so that the work is about `sum n_i^2` and not `T^2`, and plain causal
attention runs on each block: padding sits after a sequence's last token, where no query of that sequence looks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

NAME = "rlrun_packed"


@dataclass(frozen=True)
class Block:
    """Sequences of similar length, padded to the longest, as indices into the row."""

    gather: Tensor
    """`[S, L]` int64: the row's position of each token; padding points at some valid position."""
    valid: Tensor
    """`[S, L]` bool."""
    positions: Tensor
    """`[sum of lengths]` int64: `gather[valid]`."""


@dataclass(frozen=True)
class Layout:
    """How a row is divided into sequences."""

    lengths: tuple[int, ...]
    boundaries: Tensor
    """`[N + 1]` int32, cumulative lengths from 0."""
    blocks: tuple[Block, ...]
    """Empty on CUDA, where they are not needed."""


def layout(lengths: Sequence[int], device: torch.device) -> Layout:
    """The layout of a row of these sequences; they add up to T."""
    boundaries = torch.zeros(len(lengths) + 1, dtype=torch.int32)
    boundaries[1:] = torch.tensor(lengths, dtype=torch.int32).cumsum(0)
    blocks: tuple[Block, ...] = ()
    if device.type != "cuda":
        by_size: dict[int, list[int]] = {}
        for index, length in enumerate(lengths):
            by_size.setdefault((length - 1).bit_length(), []).append(index)
        blocks = tuple(_block(boundaries, lengths, members) for _, members in sorted(by_size.items()))
    return Layout(tuple(lengths), boundaries.to(device), blocks)


def _block(boundaries: Tensor, lengths: Sequence[int], members: Sequence[int]) -> Block:
    sizes = torch.tensor([lengths[i] for i in members])
    starts = boundaries[torch.tensor(members)].long()
    offsets = torch.arange(int(sizes.max()))
    valid = offsets[None, :] < sizes[:, None]
    gather = torch.where(valid, starts[:, None] + offsets[None, :], starts[:, None])
    return Block(gather, valid, gather[valid])


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    packed: Layout,
    **_: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each sequence of a row.

    Args:
        query: `[1, heads, T, D]`; key and value `[1, key-value heads, T, D]`.
        packed: the row's layout, passed to the model as a keyword.

    Returns:
        `[1, T, heads, D]`, and no weights.
    """
    if query.is_cuda:
        return _variable_length(query, key, value, scaling, packed), None
    groups = query.shape[1] // key.shape[1]
    output = query.new_empty(query.shape[2], query.shape[1], value.shape[3])
    parts, order = [], []
    for block in packed.blocks:
        q, k, v = (tensor[0].transpose(0, 1)[block.gather].transpose(1, 2) for tensor in (query, key, value))
        if groups > 1:
            k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        attended = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling)
        parts.append(attended.transpose(1, 2)[block.valid])
        order.append(block.positions)
    output = output.index_copy(0, torch.cat(order), torch.cat(parts))
    return output[None], None


def _variable_length(query: Tensor, key: Tensor, value: Tensor, scaling: float | None, packed: Layout) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    longest = max(packed.lengths)
    output: Tensor = varlen_attn(
        *(tensor[0].transpose(0, 1).contiguous() for tensor in (query, key, value)),
        packed.boundaries,
        packed.boundaries,
        longest,
        longest,
        scale=scaling,
        window_size=(-1, 0),
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return output[None]


def register() -> None:
    """Make `attn_implementation="rlrun_packed"` known to transformers. It gets no mask: the layout says it all."""
    AttentionInterface.register(NAME, packed_attention)
