"""Attention by torch's kernels for padded blocks and by flex_attention; `attend` is the entry point for all kernels.

`sdpa` and `cudnn` take sequences of equal length: sequences are grouped into padded blocks of similar length. The cost is about the sum of
n_i^2 instead of T^2. Padding follows a sequence's last token, so queries never attend to it.

`flex` is flex_attention over packed rows: compiled on CUDA, with a block mask computed once per row and window.

The flash kernels are in `flash`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from rlrun.fit.attention_kernels import Kernel
from rlrun.trainer.modeling.attention.flash import FLASH_KERNELS
from rlrun.trainer.modeling.attention.packed_layout import Block, Scores, Segments, dense_attention, visible_keys


def sdpa(query: Tensor, key: Tensor, value: Tensor, segments: Segments, scores: Scores) -> Tensor:
    """Compute torch's attention by blocks, or plain matrix products for unsupported options; for the arguments see `attend`."""
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

    It supports no option of `Scores` except for the scale; `rlrun.fit.attention_kernels` excludes others.
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


_MASKS = 8
"""Number of cached masks: those of a row and its windows are needed by all layers."""
Condition = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""Function of batch, head, and the query's and key's positions in the row; returns whether the query sees the key."""


def flex(query: Tensor, key: Tensor, value: Tensor, segments: Segments, scores: Scores) -> Tensor:
    """Compute attention with any option; the backward pass needs CUDA. For the arguments see `attend`."""
    on_gpu = query.is_cuda
    mask = _block_mask(segments.queries, segments.keys, scores.window, query.device)
    found = _compiled_function(on_gpu)(
        *(tensor.transpose(0, 1)[None] for tensor in (query, key, value)),
        score_mod=None if scores.softcap is None else make_capped_score(scores.softcap),
        block_mask=mask,
        scale=scores.scale,
        enable_gqa=query.shape[1] != key.shape[1],
        **({} if scores.sinks is None else {"return_aux": AuxRequest(lse=True)}),
    )
    if scores.sinks is None:
        output: Tensor = found
        return output[0].transpose(0, 1)
    output, auxiliary = found
    share = torch.sigmoid(
        auxiliary.lse - scores.sinks.float()[None, :, None]
    )  # exp(lse) / (exp(lse) + exp(sink)), differentiable
    return (output * share[..., None].to(output.dtype))[0].transpose(0, 1)


@lru_cache(maxsize=16)
def make_capped_score(softcap: float) -> Callable[..., Tensor]:
    """Return the score modification for a soft cap; cached, so that equal caps do not cause a recompilation."""

    def capped_score(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    return capped_score


def mask_condition(
    queries: tuple[int, ...], keys: tuple[int, ...], window: int | None, device: torch.device
) -> Condition:
    """Return the condition under which a query of a row sees a key; for the segments see `Segments`."""
    sizes = [torch.tensor(lengths, device=device) for lengths in (queries, keys)]
    owners = [torch.arange(len(size), device=device).repeat_interleave(size) for size in sizes]
    # Position of a query among the keys: the last query of a segment is at its last key.
    ahead = (sizes[1].cumsum(0) - sizes[0].cumsum(0)).repeat_interleave(sizes[0])
    query_owner, key_owner = owners

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        distance = query + ahead[query] - key
        found = (query_owner[query] == key_owner[key]) & (distance >= 0)
        return found if window is None else found & (distance < window)

    return sees


@lru_cache(maxsize=_MASKS)
def _block_mask(queries: tuple[int, ...], keys: tuple[int, ...], window: int | None, device: torch.device) -> BlockMask:
    # A mask of all pairs of 65k tokens takes 4 GiB; compiled code never creates it.
    compiled = device.type == "cuda"
    sees = mask_condition(queries, keys, window, device)
    return create_block_mask(sees, None, None, sum(queries), sum(keys), device=device, _compile=compiled)


@lru_cache(maxsize=2)
def _compiled_function(compiled: bool) -> Callable[..., Any]:
    found: Callable[..., Any] = torch.compile(flex_attention, dynamic=None) if compiled else flex_attention
    return found


Function = Callable[[Tensor, Tensor, Tensor, Segments, Scores], Tensor]
FUNCTIONS: Mapping[Kernel, Function] = {
    **{name: kernel.attend for name, kernel in FLASH_KERNELS.items()},
    "cudnn": cudnn,
    "flex": flex,
    "sdpa": sdpa,
}


def attend(kernel: Kernel, query: Tensor, key: Tensor, value: Tensor, segments: Segments, scores: Scores) -> Tensor:
    """Compute causal attention within each segment.

    Args:
        kernel: attention kernel, which must support the options (`attention_kernels.BACKENDS`); `choose_kernel` ensures this.
        query: queries of all segments, concatenated, `[queries, heads, D]`.
        key: keys `[keys, key-value heads, D]`; value is `[keys, key-value heads, V]`. Equal groups of query heads share them.
        segments: pairs of query and key ranges.
        scores: options of the layer.

    Returns:
        Output `[queries, heads, V]`.
    """
    # Remove a window that excludes no key, so that kernels without windows work; not in compiled code, which would be recompiled per
    # length.
    if scores.window is not None and not torch.compiler.is_compiling() and scores.window >= segments.longest_key:
        scores = replace(scores, window=None)
    if scores.sinks is not None and scores.sinks.shape != (query.shape[1],):
        raise ValueError(f"sinks of shape {list(scores.sinks.shape)} for {query.shape[1]} heads")
    return FUNCTIONS[kernel](query, key, value, segments, scores)
