"""Division of a row into sequences, and of a rank's part of it into segments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor


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
class Context:
    """Relation of a row part's queries to the keys of the whole row. A segment is the part's share of one sequence."""

    group: dist.ProcessGroup
    """The ranks that have the row's parts."""
    queries: tuple[int, ...]
    """Queries of each segment, in the part's order."""
    keys: tuple[int, ...]
    """Keys of each segment: its sequence from the start to the segment's last query."""
    gather: Tensor
    """`[sum of keys]` int64: where each key stands among all ranks' parts, end to end."""


@dataclass(frozen=True)
class Segments:
    """Pairs of queries and keys that belong together; of each, the last query sees all keys, and the one before one key less."""

    queries: tuple[int, ...]
    """Queries of each segment, end to end in their tensor."""
    keys: tuple[int, ...]
    query_ends: Tensor
    """`[N + 1]` int32: cumulative queries from 0, on the device."""
    key_ends: Tensor
    blocks: tuple[Block, ...] | None = None
    """Segments of as many queries as keys, by size; None: some have fewer queries."""

    @cached_property
    def longest_query(self) -> int:
        """Most queries of a segment."""
        return max(self.queries)

    @cached_property
    def longest_key(self) -> int:
        """Most keys of a segment."""
        return max(self.keys)


@dataclass(frozen=True)
class Layout:
    """Division of a row into sequences."""

    lengths: tuple[int, ...]
    boundaries: Tensor
    """`[N + 1]` int32, cumulative lengths from 0."""
    context: Context | None = None
    """Set with context parallelism: this rank has only a part of the row."""

    @cached_property
    def segments(self) -> Segments:
        """The sequences; of a part, its segments."""
        if self.context is None:
            return Segments(self.lengths, self.lengths, self.boundaries, self.boundaries, self.blocks)
        queries, keys, device = self.context.queries, self.context.keys, self.boundaries.device
        return Segments(queries, keys, _boundaries(queries, device), _boundaries(keys, device))

    @cached_property
    def blocks(self) -> tuple[Block, ...]:
        """The sequences by size, for kernels that want them padded."""
        by_size: dict[int, list[int]] = {}
        for index, length in enumerate(self.lengths):
            by_size.setdefault((length - 1).bit_length(), []).append(index)
        return tuple(_block(self.boundaries, self.lengths, members) for _, members in sorted(by_size.items()))


def layout(lengths: Sequence[int], device: torch.device) -> Layout:
    """The layout of a row of these sequences; they add up to T."""
    return Layout(tuple(lengths), _boundaries(lengths, device))


def part_layout(whole: Layout, runs: Sequence[Sequence[range]], rank: int, group: dist.ProcessGroup) -> Layout:
    """The layout of a rank's part.

    Args:
        whole: of the row.
        runs: the positions that each rank has, in order; together they are the row.
        rank: whose part.
        group: the ranks, in order.
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
    context = Context(group, tuple(queries), tuple(keys), torch.cat(gathered).to(device))
    return Layout(whole.lengths, whole.boundaries, context)


def _block(boundaries: Tensor, lengths: Sequence[int], members: Sequence[int]) -> Block:
    device = boundaries.device
    sizes = torch.tensor([lengths[i] for i in members], device=device)
    starts = boundaries[torch.tensor(members, device=device)].long()
    offsets = torch.arange(max(lengths[i] for i in members), device=device)
    valid = offsets[None, :] < sizes[:, None]
    gather = torch.where(valid, starts[:, None] + offsets[None, :], starts[:, None])
    return Block(gather, valid, gather[valid])


def _boundaries(lengths: Sequence[int], device: torch.device) -> Tensor:
    cumulative = torch.zeros(len(lengths) + 1, dtype=torch.int32)
    cumulative[1:] = torch.tensor(lengths, dtype=torch.int32).cumsum(0)
    return cumulative.to(device)
