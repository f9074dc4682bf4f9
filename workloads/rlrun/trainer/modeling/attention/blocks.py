"""Kernels for sequences of equal length (`sdpa`, `cudnn`): sequences are grouped into padded blocks of similar length.

The cost is about `sum n_i^2` instead of `T^2`. Padding follows a sequence's last token, so queries never attend to it.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from rlrun.trainer.modeling.attention.layout import Block, Segments
from rlrun.trainer.modeling.attention.scores import Scores, dense_attention, visible_keys


def sdpa(query: Tensor, key: Tensor, value: Tensor, segments: Segments, scores: Scores) -> Tensor:
    """Compute torch's attention by blocks, or plain matrix products for unsupported options; for the arguments see `compute.attend`."""
    groups = query.shape[1] // key.shape[1]
    if segments.blocks is None:
        return _one_by_one(query, key, value, segments, scores)
    output = query.new_empty(query.shape[0], query.shape[1], value.shape[2])
    parts, order = [], []
    for block in segments.blocks:
        q, k, v = (tensor[block.gather].transpose(1, 2) for tensor in (query, key, value))
        parts.append(_attend_block(q, k, v, groups, scores).transpose(1, 2)[block.valid])
        order.append(block.positions)
    return output.index_copy(0, torch.cat(order), torch.cat(parts))


def cudnn(query: Tensor, key: Tensor, value: Tensor, segments: Segments, scores: Scores) -> Tensor:
    """Compute cuDNN's attention by blocks.

    It supports no option of `Scores` except for the scale; `kernel_table` excludes others.
    """
    assert segments.blocks is not None
    output = query.new_empty(query.shape)
    parts, order = [], []
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        for block in segments.blocks:
            parts.append(_of_block(query, key, value, block, scores.scale))
            order.append(block.positions)
    return output.index_copy(0, torch.cat(order), torch.cat(parts))


def _of_block(query: Tensor, key: Tensor, value: Tensor, block: Block, scale: float) -> Tensor:
    q, k, v = (tensor[block.gather].transpose(1, 2) for tensor in (query, key, value))
    grouped = q.shape[1] != k.shape[1]
    found = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=grouped)
    return found.transpose(1, 2)[block.valid]


def _one_by_one(query: Tensor, key: Tensor, value: Tensor, segments: Segments, scores: Scores) -> Tensor:
    groups, parts = query.shape[1] // key.shape[1], []
    for one in zip(query.split(segments.queries), key.split(segments.keys), value.split(segments.keys), strict=True):
        q, k, v = (tensor.transpose(0, 1)[None] for tensor in one)
        parts.append(_attend_block(q, k, v, groups, scores)[0].transpose(0, 1))
    return torch.cat(parts)


def _attend_block(query: Tensor, key: Tensor, value: Tensor, groups: int, scores: Scores) -> Tensor:
    """Compute one block: query `[S, heads, L, D]`, key and value `[S, key-value heads, K, D]` -> `[S, heads, L, D]`."""
    if groups > 1:
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    if not scores.plain:
        return dense_attention(query, key, value, scores)
    mask = visible_keys(query.shape[2], key.shape[2], scores.window, query.device)
    return scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=mask is None, scale=scores.scale)
