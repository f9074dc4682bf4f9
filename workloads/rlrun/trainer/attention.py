"""Attention over packed rows that never crosses a sequence's boundary, as an attention function of transformers.

A row is `[1, T]` with several sequences end to end. On CUDA torch's variable-length flash attention takes it as it is (`varlen`).
Elsewhere (`sdpa`) the sequences are regrouped into padded blocks of similar length, so that the work is about `sum n_i^2` and not `T^2`,
and plain causal attention runs on each block: padding sits after a sequence's last token, where no query of that sequence looks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from rlrun.config.parallel import AttentionKernel
from rlrun.protocol import exit_codes
from rlrun.protocol.failures import RoleError
from rlrun.trainer.parallel.collectives import gather

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
class Context:
    """How the queries of a part of a row meet the keys of the whole row. A segment is the part's share of one sequence."""

    group: dist.ProcessGroup
    """The ranks that have the row's parts."""
    queries: tuple[int, ...]
    """Queries of each segment, in the part's order."""
    keys: tuple[int, ...]
    """Keys of each segment: its sequence from the start to the segment's last query."""
    gather: Tensor
    """`[sum of keys]` int64: where each key stands among all ranks' parts, end to end."""


@dataclass(frozen=True)
class Layout:
    """How a row is divided into sequences."""

    lengths: tuple[int, ...]
    boundaries: Tensor
    """`[N + 1]` int32, cumulative lengths from 0."""
    context: Context | None = None
    """With context parallelism: this rank has only a part of the row."""

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


@torch.compiler.disable  # type: ignore[untyped-decorator]
def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    packed: Layout,
    kernel: AttentionKernel = "auto",
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each sequence of a row.

    Args:
        query: `[1, heads, T, D]`; key and value `[1, key-value heads, T, D]`. Of a part of the row, when the layout says so.
        packed: the row's layout, passed to the model as a keyword.
        kernel: what computes it; auto: `varlen` on CUDA, `sdpa` elsewhere.
        sliding_window: of the model; fine as long as no sequence is longer.
        softcap: of the model's attention logits.

    Returns:
        `[1, T, heads, D]`, and no weights.

    Raises:
        RoleError: the model's attention is another one.
    """
    if softcap is not None or (sliding_window is not None and max(packed.lengths) > sliding_window):
        what = f"soft-capped attention ({softcap})" if softcap is not None else f"a sliding window ({sliding_window})"
        fix = "choose another model" if softcap is not None else f"set seqLen to at most {sliding_window}"
        raise RoleError(f"model: its layers have {what}, which the trainer does not compute; {fix}", exit_codes.DATA)
    variable = query.is_cuda if kernel == "auto" else kernel == "varlen"
    if packed.context is not None:
        return _of_part(query, key, value, scaling, packed.context, variable), None
    if variable:
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


def _of_part(
    query: Tensor, key: Tensor, value: Tensor, scaling: float | None, context: Context, variable: bool
) -> Tensor:
    """Keys and values come from all ranks; a segment's queries are the last of its keys' positions."""
    queries = query[0].transpose(0, 1)
    together = gather(torch.cat([key[0], value[0]], dim=-1).transpose(0, 1), context.group)[context.gather]
    keys, values = together.split([key.shape[3], value.shape[3]], dim=-1)
    if variable:
        return _segments(queries, keys, values, context.queries, context.keys, scaling)[None]
    groups = query.shape[1] // key.shape[1]
    parts = []
    for q, k, v in zip(
        queries.split(context.queries), keys.split(context.keys), values.split(context.keys), strict=True
    ):
        q, k, v = (tensor.transpose(0, 1)[None] for tensor in (q, k, v))
        if groups > 1:
            k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril(k.shape[2] - q.shape[2])
        parts.append(scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scaling)[0].transpose(0, 1))
    return torch.cat(parts)[None]


def _variable_length(query: Tensor, key: Tensor, value: Tensor, scaling: float | None, packed: Layout) -> Tensor:
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    return _segments(q, k, v, packed.lengths, packed.lengths, scaling, boundaries=packed.boundaries)[None]


def _segments(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    queries: Sequence[int],
    keys: Sequence[int],
    scaling: float | None,
    *,
    boundaries: Tensor | None = None,
) -> Tensor:
    """torch's flash attention over tensors `[tokens, heads, D]` of several segments; the last query sees all of its segment's keys."""
    from torch.nn.attention.varlen import varlen_attn

    output: Tensor = varlen_attn(
        query.contiguous(),
        key.contiguous(),
        value.contiguous(),
        _boundaries(queries, query.device) if boundaries is None else boundaries,
        _boundaries(keys, query.device) if boundaries is None else boundaries,
        max(queries),
        max(keys),
        scale=scaling,
        window_size=(-1, 0),
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return output


def _boundaries(lengths: Sequence[int], device: torch.device) -> Tensor:
    cumulative = torch.zeros(len(lengths) + 1, dtype=torch.int32)
    cumulative[1:] = torch.tensor(lengths, dtype=torch.int32).cumsum(0)
    return cumulative.to(device)


def register() -> None:
    """Make `implementation(...)` known to transformers. It gets no mask: the layout says it all."""
    AttentionInterface.register(NAME, packed_attention)
    for kernel in get_args(AttentionKernel):
        if kernel != "auto":
            AttentionInterface.register(implementation(kernel), partial(packed_attention, kernel=kernel))


def implementation(kernel: AttentionKernel) -> str:
    """The name under which transformers finds it: its `attn_implementation`."""
    return NAME if kernel == "auto" else f"{NAME}_{kernel}"
