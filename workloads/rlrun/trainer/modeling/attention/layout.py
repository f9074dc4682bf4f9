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
    """Keys of the whole row for a part's queries. A segment is the part's share of one sequence, and has its keys up to its last query."""

    group: dist.ProcessGroup
    """The ranks that have the row's parts."""
    gather: Tensor
    """`[sum of keys]` int64: where each key stands among all ranks' parts, end to end."""


class Segments:
    """Pairs of queries and keys that belong together; of each, the last query sees all keys, and the one before one key less.

    No dataclass, as `Layout`: FSDP copies those for every layer, and what they keep with them.
    """

    def __init__(self, queries: Sequence[int], keys: Sequence[int], query_ends: Tensor, key_ends: Tensor) -> None:
        """Keep the parts.

        Args:
            queries: of each segment, end to end in their tensor.
            keys: of each segment.
            query_ends: `[N + 1]` int32, cumulative queries from 0, on the device.
            key_ends: likewise.
        """
        self.queries, self.keys = tuple(queries), tuple(keys)
        self.query_ends, self.key_ends = query_ends, key_ends
        self.longest_query, self.longest_key = max(queries), max(keys)

    @cached_property
    def blocks(self) -> tuple[Block, ...] | None:
        """The segments by size, for kernels that want them padded; None: some have fewer queries than keys."""
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
        """Keep the parts.

        Args:
            lengths: of the sequences, in tokens.
            boundaries: `[N + 1]` int32, cumulative lengths from 0.
            segments: the sequences; of a part, its segments.
            context: set with context parallelism: this rank has only a part of the row.
        """
        self.lengths, self.boundaries = tuple(lengths), boundaries
        self.segments, self.context = segments, context


def row_layout(lengths: Sequence[int], device: torch.device, *, boundaries: Tensor | None = None) -> Layout:
    """The layout of a row of these sequences; they add up to T. `boundaries`: those of the layout, where they are on the device already."""
    lengths = tuple(lengths)
    if boundaries is None:
        boundaries = _row_boundaries(lengths, device)
    # The compiler follows no call of a package that gets one tensor twice.
    return Layout(lengths, boundaries, Segments(lengths, lengths, boundaries, boundaries.clone()))


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
