"""Definition of a layer's attention: scores, visible keys, and the reference computation for all kernels.

s = scale q k, then softcap tanh(s / softcap); p = exp(s) / (exp(sink) + sum of exp(s) over the keys seen); output = sum of p v
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Scores:
    """Options of a layer's attention."""

    scale: float
    """Factor of the products of queries and keys."""
    window: int | None = None
    """Number of keys visible to a query, including its own position. Default: all."""
    softcap: float | None = None
    """Bound of scores by a scaled tanh. Default: unbounded."""
    sinks: Tensor | None = None
    """Score of a key without a value that every query sees, `[heads]`. Default: no sinks."""

    @property
    def plain(self) -> bool:
        """Whether torch's attention supports the options with a mask."""
        return self.softcap is None and self.sinks is None


def visible_keys(queries: int, keys: int, window: int | None, device: torch.device) -> Tensor | None:
    """Return the mask of visible keys, `[queries, keys]` bool, with the last query at the last key; None for causal attention without an
    effective window.
    """
    if queries == keys and (window is None or keys <= window):
        return None
    behind = keys - queries
    mask = torch.ones(queries, keys, dtype=torch.bool, device=device).tril(behind)
    return mask if window is None else mask.triu(behind - window + 1)


def dense_attention(query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Tensor:
    """Compute attention with complete score matrices in float32.

    Args:
        query: queries, `[..., heads, L, D]`.
        key: keys `[..., heads, K, D]`; value is `[..., heads, K, V]`. The last query is at the last key.
        scores: options of the layer.

    Returns:
        Output `[..., heads, L, V]` in the query's dtype.
    """
    found = query.float() @ key.float().transpose(-1, -2) * scores.scale
    if scores.softcap is not None:
        found = scores.softcap * torch.tanh(found / scores.softcap)
    queries, keys = found.shape[-2:]
    mask = visible_keys(queries, keys, scores.window, query.device)
    if mask is None:
        mask = torch.ones(queries, keys, dtype=torch.bool, device=query.device).tril()
    found = found.masked_fill(~mask, -torch.inf)
    if scores.sinks is not None:
        sinks = scores.sinks.float()[:, None, None].expand(*found.shape[:-1], 1)
        found = torch.cat([found, sinks], dim=-1)
    return (found.softmax(-1)[..., :keys] @ value.float()).to(query.dtype)
