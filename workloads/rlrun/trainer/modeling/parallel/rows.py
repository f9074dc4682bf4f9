"""Part of a packed row that a rank computes: a context rank its tokens in the layers, a tensor rank its positions in the head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rlrun.trainer.modeling.packed_attention import Layout, part_layout, row_layout
from rlrun.trainer.modeling.parallel.collectives import reduce_from
from rlrun.trainer.ranks.dims import Meshes

_ATTRIBUTE = "_rlrun_meshes"


@dataclass(frozen=True)
class RowPart:
    """A rank's part of a row of T tokens. Without context parallelism it has all `P = T` tokens."""

    input_ids: Tensor
    """`[P]` int64."""
    position_ids: Tensor
    """`[P]` int64."""
    packed: Layout
    """Layout that the attention needs."""
    targets: Tensor
    """`[K]` int64: positions in the whole row of the tokens whose log-probabilities this rank computes; at least one."""
    before: Tensor
    """`[K]` int64: where in the part the token before each stands."""
    counts: Tensor
    """`[K]` bool: false for a target that stands in where this rank has none."""


def attach_division(model: nn.Module, meshes: Meshes) -> None:
    """Remember how the model is divided, for `row_part` and `join_rows`."""
    object.__setattr__(model, _ATTRIBUTE, meshes)


def meshes_of(model: nn.Module) -> Meshes | None:
    """Meshes that divide the model; None for one that is not divided, or by FSDP alone."""
    return getattr(model, _ATTRIBUTE, None)


def row_part(model: nn.Module, input_ids: Tensor, position_ids: Tensor, packed: Layout, predicted: Tensor) -> RowPart:
    """Part of a row on this rank; all ranks of its context and tensor group have the whole row.

    Args:
        model: as `shard` left it, or a plain one.
        input_ids: `[T]` int64.
        position_ids: `[T]` int64.
        packed: the row's layout.
        predicted: `[N]` int64, the positions whose log-probabilities are wanted; none of them is 0.
    """
    meshes = meshes_of(model)
    before = predicted - 1
    if meshes is not None and meshes.cp is not None:
        tokens = len(input_ids)
        part = _context_part(packed, meshes)
        stands = torch.full((tokens,), -1, dtype=torch.int64, device=input_ids.device)
        real = part.tokens < tokens
        stands[part.tokens[real]] = torch.arange(len(part.tokens), device=input_ids.device)[real]
        mine = stands[before] >= 0
        predicted, before = predicted[mine], stands[before[mine]]
        filled = part.tokens.clamp(max=tokens - 1)
        positions = torch.where(real, position_ids[filled], part.tokens - tokens)
        input_ids, position_ids, packed = input_ids[filled], positions, part.packed
    if meshes is not None and meshes.tp is not None:
        start, step = meshes.tp.get_local_rank(), meshes.tp.size()
        predicted, before = predicted[start::step], before[start::step]
    counts = torch.ones_like(predicted, dtype=torch.bool)
    if not len(predicted):
        predicted, before, counts = predicted.new_ones(1), before.new_zeros(1), counts.new_zeros(1)
    return RowPart(input_ids, position_ids, packed, predicted, before, counts)


def part_tokens(model: nn.Module, tokens: int) -> int:
    """P: tokens of a row of T that a rank computes in the layers."""
    meshes = meshes_of(model)
    if meshes is None or meshes.cp is None:
        return tokens
    return 2 * -(-tokens // (2 * meshes.dims.cp))


def join_rows(model: nn.Module, part: RowPart, values: Tensor, tokens: int) -> Tensor:
    """`values [K]` of all ranks' targets in one row `[T]`, 0 elsewhere, the same on every rank of the group; differentiable."""
    meshes = meshes_of(model)
    row = values.new_zeros(tokens).index_put((part.targets,), torch.where(part.counts, values, 0))
    return row if meshes is None or meshes.row is None else reduce_from(row, meshes.row)


@dataclass(frozen=True)
class _Tokens:
    tokens: Tensor
    """`[P]` int64, positions in the padded row; those from T on are padding."""
    packed: Layout


def _context_part(packed: Layout, meshes: Meshes) -> _Tokens:
    """Two of `2 * cp` equal runs, one from each end, so that causal attention costs every rank about the same.

    What fills the row up to equal runs is a sequence of its own.
    """
    group, ranks = meshes.cp, meshes.dims.cp
    assert group is not None
    rank = torch.distributed.get_rank(group)
    tokens = sum(packed.lengths)
    run = -(-tokens // (2 * ranks))
    filling = 2 * ranks * run - tokens
    device = packed.boundaries.device
    padded = row_layout([*packed.lengths, *([filling] if filling else [])], device)
    runs: list[Sequence[range]] = [_target_runs(other, ranks, run) for other in range(ranks)]
    return _Tokens(
        torch.cat([torch.arange(r.start, r.stop, device=device) for r in runs[rank]]),
        part_layout(padded, runs, rank, group),
    )


def _target_runs(rank: int, ranks: int, run: int) -> tuple[range, range]:
    last = 2 * ranks - 1 - rank
    return range(rank * run, (rank + 1) * run), range(last * run, (last + 1) * run)
