"""Part of a packed row on a rank: tokens of a context rank in the layers, positions of a tensor rank in the head."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlrun.trainer.modeling.packed_attention import Layout, part_layout, row_layout
from rlrun.trainer.modeling.parallel.collectives import reduce_from
from rlrun.trainer.modeling.recurrent import start_row
from rlrun.trainer.modeling.router_balance import Balance, RowBalance
from rlrun.trainer.modeling.router_replay import open_routes, routing_of
from rlrun.trainer.ranks.group import Meshes

_ATTRIBUTE = "_rlrun_meshes"


@dataclass(frozen=True)
class RowPart:
    """Part of a row of T tokens on a rank. Without context parallelism it has all `P = T` tokens."""

    input_ids: Tensor
    """Token ids, `[P]` int64."""
    position_ids: Tensor
    """Positions in the sequences, `[P]` int64."""
    packed: Layout
    """Layout for attention."""
    targets: Tensor
    """Positions in the whole row of the tokens whose log-probabilities this rank computes, `[K]` int64; at least one."""
    before: Tensor
    """Position in the part of the token before each target, `[K]` int64."""
    counts: Tensor
    """Real targets, `[K]` bool; false for the dummy target of a rank without targets."""


def attach_division(model: nn.Module, meshes: Meshes) -> None:
    """Store the meshes at the model, for `row_part` and `join_rows`."""
    object.__setattr__(model, _ATTRIBUTE, meshes)


def meshes_of(model: nn.Module) -> Meshes | None:
    """Return the meshes of the model's division, or None for a model without division or with FSDP only."""
    return getattr(model, _ATTRIBUTE, None)


def row_part(
    model: nn.Module,
    input_ids: Tensor,
    position_ids: Tensor,
    packed: Layout,
    predicted: Tensor,
    *,
    routes: Tensor | None = None,
    routes_divided: bool = False,
) -> RowPart:
    """Return this rank's part of a row; all ranks of its context and tensor group pass the whole row.

    Args:
        model: sharded or plain model.
        input_ids: token ids, `[T]` int64.
        position_ids: positions in the sequences, `[T]` int64.
        packed: layout of the row.
        predicted: positions whose log-probabilities are requested, `[N]` int64, greater than 0.
        routes: experts of each token, `[T, L, K]` uint8 or uint16; ignored by a model without routing. Default: native choice.
        routes_divided: true if `routes` has only the tokens of this rank's part.
    """
    start_row(model, packed)
    meshes = meshes_of(model)
    before, whole = predicted - 1, packed
    divided: tuple[Tensor, Tensor] | None = None
    counted = len(predicted) > 0
    if meshes is not None and meshes.cp is not None:
        # Context parallelism: select this rank's tokens, and the targets whose preceding token is among them.
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
        divided = filled, real
    balance = partial(_row_balance, whole, divided, None if meshes is None else meshes.cp)
    _start_routes(model, routes, input_ids.device, divided, whole=not routes_divided, counted=counted, balance=balance)
    if meshes is not None and meshes.tp is not None:
        # Tensor parallelism: each rank computes every n-th target in the head.
        start, step = meshes.tp.get_local_rank(), meshes.tp.size()
        predicted, before = predicted[start::step], before[start::step]
    counts = torch.ones_like(predicted, dtype=torch.bool)
    # Without targets compute a dummy one, so that every rank runs the same collectives.
    if not len(predicted):
        predicted, before, counts = predicted.new_ones(1), before.new_zeros(1), counts.new_zeros(1)
    return RowPart(input_ids, position_ids, packed, predicted, before, counts)


def _start_routes(
    model: nn.Module,
    routes: Tensor | None,
    device: torch.device,
    divided: tuple[Tensor, Tensor] | None,
    *,
    whole: bool,
    counted: bool,
    balance: Callable[[Balance, int], RowBalance],
) -> None:
    """Set the routes of this rank's part of a row; without routing nothing happens.

    Args:
        model: sharded or plain model.
        routes: routes of the row, or None.
        device: device of the model.
        divided: positions of the part in the row, `[P]` int64, and tokens of it that are not padding, `[P]` bool; padding is routed
            natively. None: the part is the whole row.
        whole: true if `routes` has all tokens of the row.
        counted: true if the tokens count in the load of experts: a rank without samples computes a row without targets.
        balance: see `Routing.start_row`.
    """
    routing = routing_of(model)
    if routing is None:
        return
    given = None if routes is None else open_routes(routes, device)
    real = None
    if divided is not None:
        places, real = divided
        if given is not None:
            given = (given[places] if whole else given).masked_fill(~real[:, None, None], -1)
    routing.start_row(given, real, device, counted=counted, balance=balance)


def _row_balance(
    whole: Layout, divided: tuple[Tensor, Tensor] | None, cp: dist.ProcessGroup | None, balance: Balance, layers: int
) -> RowBalance:
    """Return the auxiliary loss of a row.

    Args:
        whole: layout of the whole row.
        divided: see `_start_routes`.
        cp: context ranks of the row, or None.
        balance: loss of the update.
        layers: layers with a router.
    """
    device = whole.boundaries.device
    places, real = (torch.arange(sum(whole.lengths), device=device), None) if divided is None else divided
    ends = whole.boundaries[1:].long()
    return RowBalance(
        balance,
        layers,
        lengths=whole.boundaries.diff().float(),
        sequences=torch.searchsorted(ends, places, right=True),
        real=real,
        group=cp,
    )


def part_tokens(model: nn.Module, tokens: int) -> int:
    """Return the number P of tokens that a rank computes in the layers for a row of T tokens."""
    meshes = meshes_of(model)
    if meshes is None or meshes.cp is None:
        return tokens
    return 2 * -(-tokens // (2 * meshes.dims.cp))


def join_rows(model: nn.Module, part: RowPart, values: Tensor, tokens: int) -> Tensor:
    """Combine the `values [K]` of all ranks' targets into one row `[T]`, 0 elsewhere; differentiable and equal on all ranks of the
    group.
    """
    meshes = meshes_of(model)
    row = values.new_zeros(tokens).index_put((part.targets,), torch.where(part.counts, values, 0))
    return row if meshes is None or meshes.row is None else reduce_from(row, meshes.row)


@dataclass(frozen=True)
class _Tokens:
    tokens: Tensor
    """Positions in the padded row, `[P]` int64; positions from T on are padding."""
    packed: Layout


def _context_part(packed: Layout, meshes: Meshes) -> _Tokens:
    """Return two of `2 * cp` equal ranges, one from each end, so that causal attention costs about the same on every rank.

    The padding of the row is a separate sequence.
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
