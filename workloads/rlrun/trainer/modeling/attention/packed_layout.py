"""Division of packed rows into sequences and segments, and the definition of attention over them.

A row is divided into sequences, and a rank's part of a row into segments. The definition of a layer's attention consists of scores,
visible keys, and the reference computation for all kernels:

    s = scale q k, then softcap tanh(s / softcap); p = exp(s) / (exp(sink) + sum of exp(s) over the keys seen); output = sum of p v
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Block:
    """Indices of sequences of similar length in the row, padded to the longest."""

    gather: Tensor
    """Position of each token in the row, `[S, L]` int64; padding refers to any valid position."""
    valid: Tensor
    """Tokens that are not padding, `[S, L]` bool."""
    positions: Tensor
    """Positions `gather[valid]`, `[sum of lengths]` int64."""


@dataclass(frozen=True)
class Context:
    """Keys of the whole row for the queries of a part. A segment is the part of one sequence, with all keys up to its last query."""

    group: dist.ProcessGroup
    """Ranks with the parts of the row."""
    gather: Tensor
    """Position of each key in the concatenated parts of all ranks, `[sum of keys]` int64."""


class Segments:
    """Pairs of query and key ranges; the last query of a pair sees all its keys, the previous one sees one key less.

    Not a dataclass, like `Layout`, because FSDP copies dataclasses for every layer, with their cached values.
    """

    def __init__(self, queries: Sequence[int], keys: Sequence[int], query_ends: Tensor, key_ends: Tensor) -> None:
        """Create segments.

        Args:
            queries: number of queries of each segment, concatenated in their tensor.
            keys: number of keys of each segment.
            query_ends: cumulative numbers of queries from 0, `[N + 1]` int32, on the device.
            key_ends: cumulative numbers of keys from 0, `[N + 1]` int32, on the device.
        """
        self.queries, self.keys = tuple(queries), tuple(keys)
        self.query_ends, self.key_ends = query_ends, key_ends
        self.longest_query, self.longest_key = max(queries), max(keys)

    @cached_property
    def blocks(self) -> tuple[Block, ...] | None:
        """Segments grouped by size for padded kernels, or None if a segment has fewer queries than keys."""
        if self.queries != self.keys:
            return None
        by_size: dict[int, list[int]] = {}
        for index, length in enumerate(self.queries):
            by_size.setdefault((length - 1).bit_length(), []).append(index)
        return tuple(_row_block(self.query_ends, self.queries, members) for _, members in sorted(by_size.items()))


class Layout:
    """Division of a row into sequences."""

    def __init__(
        self, lengths: Sequence[int], boundaries: Tensor, segments: Segments, context: Context | None = None
    ) -> None:
        """Create a layout.

        Args:
            lengths: tokens of each sequence.
            boundaries: cumulative lengths from 0, `[N + 1]` int32.
            segments: the sequences, or the segments of a part.
            context: keys of the whole row if this rank has only a part of it (context parallelism).
        """
        self.lengths, self.boundaries = tuple(lengths), boundaries
        self.segments, self.context = segments, context


def row_layout(lengths: Sequence[int], device: torch.device, *, boundaries: Tensor | None = None) -> Layout:
    """Create the layout of a row from the lengths of its sequences. `boundaries`: cumulative lengths, if they are on the device already."""
    lengths = tuple(lengths)
    if boundaries is None:
        boundaries = _row_boundaries(lengths, device)
    # The compiler cannot trace calls of packages that get the same tensor twice.
    return Layout(lengths, boundaries, Segments(lengths, lengths, boundaries, boundaries.clone()))


def part_layout(whole: Layout, runs: Sequence[Sequence[range]], rank: int, group: dist.ProcessGroup) -> Layout:
    """Create the layout of a rank's part of a row.

    Args:
        whole: layout of the row.
        runs: ranges of positions of each rank, in order; together they are the row.
        rank: number of the rank.
        group: ranks that share the row, in order.
    """
    ends = torch.tensor(whole.lengths).cumsum(0).tolist()
    device = whole.boundaries.device
    place = torch.empty(ends[-1], dtype=torch.int64)
    place[torch.cat([torch.arange(run.start, run.stop) for parts in runs for run in parts])] = torch.arange(ends[-1])
    queries, keys, gathered = [], [], []
    for run in runs[rank]:
        for length, end in zip(whole.lengths, ends, strict=True):
            first, last = max(run.start, end - length), min(run.stop, end)
            if first < last:
                queries.append(last - first)
                keys.append(last - (end - length))
                gathered.append(place[end - length : last])
    segments = Segments(tuple(queries), tuple(keys), _row_boundaries(queries, device), _row_boundaries(keys, device))
    return Layout(whole.lengths, whole.boundaries, segments, Context(group, torch.cat(gathered).to(device)))


def _row_block(boundaries: Tensor, lengths: Sequence[int], members: Sequence[int]) -> Block:
    device = boundaries.device
    sizes = torch.tensor([lengths[i] for i in members], device=device)
    starts = boundaries[torch.tensor(members, device=device)].long()
    offsets = torch.arange(max(lengths[i] for i in members), device=device)
    valid = offsets[None, :] < sizes[:, None]
    gather = torch.where(valid, starts[:, None] + offsets[None, :], starts[:, None])
    return Block(gather, valid, gather[valid])


def _row_boundaries(lengths: Sequence[int], device: torch.device) -> Tensor:
    cumulative = torch.zeros(len(lengths) + 1, dtype=torch.int32)
    cumulative[1:] = torch.tensor(lengths, dtype=torch.int32).cumsum(0)
    return cumulative.to(device)


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
