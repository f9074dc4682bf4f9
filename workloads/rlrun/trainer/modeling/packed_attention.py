"""Attention over packed rows that never crosses a sequence's boundary, as an attention function of transformers.

A row is `[1, T]` with several sequences end to end. On CUDA torch's variable-length flash attention takes it as it is (`varlen`).
Elsewhere (`sdpa`) the sequences are regrouped into padded blocks of similar length, so that the work is about `sum n_i^2` and not `T^2`,
and plain causal attention runs on each block: padding sits after a sequence's last token, where no query of that sequence looks.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from rlrun.config.models.parallel import AttentionKernel
from rlrun.protocol.files.failures import RoleError
from rlrun.runtime import exit_codes
from rlrun.trainer.modeling.parallel.collectives import gather

NAME = "rlrun_packed"
_NEUTRAL = frozenset({"position_ids", "cache_position", "logits_to_keep"})
"""Keywords that models hand through to their attention and that say nothing about its numbers."""
_NEUTRAL_VALUES = {"is_causal": True, "return_dict": True, "dropout": 0.0}
"""Values of other keywords that change nothing; of all that are not here, False."""


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
class Layout:
    """Division of a row into sequences."""

    lengths: tuple[int, ...]
    boundaries: Tensor
    """`[N + 1]` int32, cumulative lengths from 0."""
    context: Context | None = None
    """Set with context parallelism: this rank has only a part of the row."""

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


def chosen_kernel(kernel: AttentionKernel, device: torch.device) -> Literal["varlen", "sdpa"]:
    """The kernel that computes on a device; auto: `varlen` on CUDA, `sdpa` elsewhere."""
    if kernel == "auto":
        return "varlen" if device.type == "cuda" else "sdpa"
    return kernel


@torch.compiler.disable  # type: ignore[untyped-decorator]
def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    packed: Layout | None = None,
    kernel: AttentionKernel = "auto",
    sliding_window: int | None = None,
    **options: object,
) -> tuple[Tensor, None]:
    """Causal attention within each sequence of a row.

    Args:
        query: `[1, heads, T, D]`; key and value `[1, key-value heads, T, D]`. Of a part of the row, when the layout says so.
        packed: the row's layout, passed to the model as a keyword, which it hands on.
        kernel: what computes it, see `chosen_kernel`.
        sliding_window: tokens that a query looks at, itself and those before it; None: all.
        options: everything else that the model's attention has; none of it may change the numbers.

    Returns:
        `[1, T, heads, D]`, and no weights.

    Raises:
        RoleError: the model's attention is another one; names the option.
    """
    if packed is None:
        raise RoleError(
            f"its layers do not hand the row's layout on to their attention ({type(module).__name__})",
            exit_codes.CONFIGURATION,
        )
    _refuse_unread(module, attention_mask, options)
    variable = chosen_kernel(kernel, query.device) == "varlen"
    if packed.context is not None:
        return _of_part(query, key, value, scaling, sliding_window, packed.context, variable), None
    if variable:
        return _variable_length(query, key, value, scaling, sliding_window, packed), None
    groups = query.shape[1] // key.shape[1]
    output = query.new_empty(query.shape[2], query.shape[1], value.shape[3])
    parts, order = [], []
    for block in packed.blocks:
        q, k, v = (tensor[0].transpose(0, 1)[block.gather].transpose(1, 2) for tensor in (query, key, value))
        if groups > 1:
            k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        seen = _seen(q.shape[2], k.shape[2], sliding_window, q.device)
        attended = scaled_dot_product_attention(q, k, v, attn_mask=seen, is_causal=seen is None, scale=scaling)
        parts.append(attended.transpose(1, 2)[block.valid])
        order.append(block.positions)
    output = output.index_copy(0, torch.cat(order), torch.cat(parts))
    return output[None], None


def _refuse_unread(module: nn.Module, attention_mask: Tensor | None, options: Mapping[str, object]) -> None:
    """Raise `RoleError` for an option of the attention that changes its numbers and that nothing here reads."""
    unread = {name: value for name, value in options.items() if name not in _NEUTRAL and value is not None}
    unread = {name: value for name, value in unread.items() if not _changes_nothing(name, value)}
    if attention_mask is not None:
        unread["attention_mask"] = attention_mask
    if unread:
        told = [
            f"{name} ({value})" if isinstance(value, bool | int | float | str) else name
            for name, value in unread.items()
        ]
        raise RoleError(
            f"its attention ({type(module).__name__}) has {', '.join(told)}, which the trainer's attention does not compute",
            exit_codes.CONFIGURATION,
        )


def _changes_nothing(name: str, value: object) -> bool:
    return isinstance(value, bool | int | float) and value == _NEUTRAL_VALUES.get(name, False)


def _seen(queries: int, keys: int, window: int | None, device: torch.device) -> Tensor | None:
    """Mask of keys that each query sees, `[queries, keys]` bool; the last query is at the last key. None: causal, and no window acts."""
    if queries == keys and (window is None or keys <= window):
        return None
    behind = keys - queries
    seen = torch.ones(queries, keys, dtype=torch.bool, device=device).tril(behind)
    return seen if window is None else seen.triu(behind - window + 1)


def _of_part(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float | None,
    window: int | None,
    context: Context,
    variable: bool,
) -> Tensor:
    """Keys and values come from all ranks; a segment's queries are the last of its keys' positions."""
    queries = query[0].transpose(0, 1)
    together = gather(torch.cat([key[0], value[0]], dim=-1).transpose(0, 1), context.group)[context.gather]
    keys, values = together.split([key.shape[3], value.shape[3]], dim=-1)
    if variable:
        return _segments(queries, keys, values, context.queries, context.keys, scaling, window)[None]
    groups = query.shape[1] // key.shape[1]
    parts = []
    for q, k, v in zip(
        queries.split(context.queries), keys.split(context.keys), values.split(context.keys), strict=True
    ):
        q, k, v = (tensor.transpose(0, 1)[None] for tensor in (q, k, v))
        if groups > 1:
            k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        seen = _seen(q.shape[2], k.shape[2], window, q.device)
        attended = scaled_dot_product_attention(q, k, v, attn_mask=seen, is_causal=seen is None, scale=scaling)
        parts.append(attended[0].transpose(0, 1))
    return torch.cat(parts)[None]


def _variable_length(
    query: Tensor, key: Tensor, value: Tensor, scaling: float | None, window: int | None, packed: Layout
) -> Tensor:
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    return _segments(q, k, v, packed.lengths, packed.lengths, scaling, window, boundaries=packed.boundaries)[None]


def _segments(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    queries: Sequence[int],
    keys: Sequence[int],
    scaling: float | None,
    window: int | None,
    *,
    boundaries: Tensor | None = None,
) -> Tensor:
    """torch's flash attention over tensors `[tokens, heads, D]` of several segments; the last query sees all of its segment's keys."""
    from torch.nn.attention.varlen import varlen_attn

    grouped = {"enable_gqa": query.shape[1] != key.shape[1]} if _names_grouped_heads(varlen_attn) else {}
    output: Tensor = varlen_attn(
        query.contiguous(),
        key.contiguous(),
        value.contiguous(),
        _boundaries(queries, query.device) if boundaries is None else boundaries,
        _boundaries(keys, query.device) if boundaries is None else boundaries,
        max(queries),
        max(keys),
        scale=scaling,
        window_size=(-1 if window is None else window - 1, 0),
        **grouped,
    )
    return output


@cache
def _names_grouped_heads(function: Callable[..., object]) -> bool:
    """True if torch's function needs an argument for fewer key-value heads: up to 2.11 it has none, and takes them as they are."""
    return "enable_gqa" in inspect.signature(function).parameters


def _boundaries(lengths: Sequence[int], device: torch.device) -> Tensor:
    cumulative = torch.zeros(len(lengths) + 1, dtype=torch.int32)
    cumulative[1:] = torch.tensor(lengths, dtype=torch.int32).cumsum(0)
    return cumulative.to(device)


def register() -> None:
    """Make `implementation(...)` known to transformers. It gets no mask: the layout has all that it needs."""
    AttentionInterface.register(NAME, packed_attention)
    for kernel in get_args(AttentionKernel):
        if kernel != "auto":
            AttentionInterface.register(implementation(kernel), partial(packed_attention, kernel=kernel))


def implementation(kernel: AttentionKernel) -> str:
    """The name under which transformers finds it: its `attn_implementation`."""
    return NAME if kernel == "auto" else f"{NAME}_{kernel}"
