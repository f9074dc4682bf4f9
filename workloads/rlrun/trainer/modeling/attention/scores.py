"""Definition of a layer's attention: scores, what a query sees, and the plain computation that every kernel is compared with.

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
    """Keys that a query sees, its own and those before it; None: all."""
    softcap: float | None = None
    """Bound of a score's absolute value, reached by a tanh; None: none."""
    sinks: Tensor | None = None
    """`[heads]`: score of a key without a value that every query sees; None: there is none."""

    @property
    def plain(self) -> bool:
        """True if torch's own attention computes it, given a mask."""
        return self.softcap is None and self.sinks is None


def visible_keys(queries: int, keys: int, window: int | None, device: torch.device) -> Tensor | None:
    """Mask of keys that each query sees, `[queries, keys]` bool; the last query is at the last key. None: causal, and no window acts."""
    if queries == keys and (window is None or keys <= window):
        return None
    behind = keys - queries
    mask = torch.ones(queries, keys, dtype=torch.bool, device=device).tril(behind)
    return mask if window is None else mask.triu(behind - window + 1)


def dense_attention(query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Tensor:
    """Attention by whole matrices of scores, in float32.

    Args:
        query: `[..., heads, L, D]`.
        key: `[..., heads, K, D]`; value `[..., heads, K, V]`. The last query is at the last key.
        scores: the options.

    Returns:
        `[..., heads, L, V]`, in the query's format.
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
