"""flex_attention over packed rows (`flex`): compiled on CUDA, with a block mask computed once per row and window."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention

from rlrun.trainer.modeling.attention.layout import Segments
from rlrun.trainer.modeling.attention.scores import Scores

_MASKS = 8
"""Number of cached masks: those of a row and its windows are needed by all layers."""
Condition = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""Function of batch, head, and the query's and key's positions in the row; returns whether the query sees the key."""


def flex(query: Tensor, key: Tensor, value: Tensor, segments: Segments, scores: Scores) -> Tensor:
    """Compute attention with any option; the backward pass needs CUDA. For the arguments see `compute.attend`."""
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
