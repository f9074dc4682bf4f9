"""Exchange of matrices that ranks divide: each matrix is gathered at one rank, its owner, and its parts are sent back.

A matrix may be divided by rows or columns, once (FSDP, tensor parallelism) or twice (both). The exchange undoes one division after the
other, and deals the matrices to the ranks of each, so that K matrices over N ranks are at most ceil(K / N) complete matrices on each rank.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard


class Division(NamedTuple):
    """Division of one dimension of a matrix over ranks, in parts like those of `torch.chunk`."""

    group: dist.ProcessGroup
    dim: int
    """Divided dimension: 0 for rows, 1 for columns."""


def matrix_divisions(parameter: Tensor) -> tuple[Division, ...] | None:
    """Return the divisions of the matrices of a parameter, the innermost first.

    A division of the dimensions before the last two, such as that of experts over ranks, leaves matrices complete and does not count.

    Returns:
        Divisions; empty if this rank's part consists of complete matrices; None if the exchange does not support the sharding.
    """
    if not isinstance(parameter, DTensor):
        return ()
    placements, sizes = parameter.placements, parameter.device_mesh.shape
    dividing = _dividing_dimensions(parameter)
    inner: list[int] = []
    outer: list[int] = []
    for at in dividing:
        placement = placements[at]
        if not isinstance(placement, Shard | _StridedShard):
            return None
        if placement.dim < parameter.ndim - 2:
            continue
        if isinstance(placement, _StridedShard):
            # FSDP divides the part of a tensor parallel rank, although its dimension of the mesh comes first.
            after = [i for i in dividing if i > at and placements[i] == Shard(placement.dim)]
            if placement.split_factor != math.prod(sizes[i] for i in after):
                return None
            inner.append(at)
        else:
            outer.append(at)
    if len(inner) > 1:
        return None
    # Without strides, the division of the first dimension of the mesh is the outermost.
    return tuple(
        Division(parameter.device_mesh.get_group(at), placements[at].dim - parameter.ndim + 2)
        for at in (*inner, *reversed(outer))
    )


def dividing_ranks(parameter: DTensor) -> int:
    """Return the number of ranks that divide one copy of a parameter."""
    return math.prod(parameter.device_mesh.shape[at] for at in _dividing_dimensions(parameter))


def _dividing_dimensions(parameter: DTensor) -> list[int]:
    """Return the dimensions of the mesh that divide a parameter."""
    sizes = zip(parameter.placements, parameter.device_mesh.shape, strict=True)
    return [at for at, (placement, size) in enumerate(sizes) if size > 1 and not isinstance(placement, Replicate)]


class Dealer:
    """Owners of matrices. Each exchange of a group starts with the rank after the last owner, so that remainders do not add up."""

    def __init__(self) -> None:
        self._dealt: Counter[dist.ProcessGroup] = Counter()

    def deal(self, divisions: Sequence[Division], shape: tuple[int, int], parts: Sequence[Tensor]) -> MatrixDeal:
        """Create the exchange of matrices `shape` from this rank's parts of all of them; the ranks have them in the same order."""
        return MatrixDeal(self, divisions, shape, parts)

    def next_owner(self, group: dist.ProcessGroup, matrices: int) -> int:
        """Return the rank in `group` that owns the first of the next `matrices`."""
        first = self._dealt[group] % int(dist.get_world_size(group))
        self._dealt[group] += matrices
        return first


class MatrixDeal:
    """Exchange of matrices of one shape and sharding.

    Args:
        dealer: owners of matrices.
        divisions: divisions of each matrix, the innermost first.
        shape: shape of a complete matrix.
        parts: part of each matrix on this rank.
    """

    def __init__(
        self, dealer: Dealer, divisions: Sequence[Division], shape: tuple[int, int], parts: Sequence[Tensor]
    ) -> None:
        self._dealer, self._divisions, self._parts = dealer, divisions, parts
        self._extents: list[int] = []
        """Size of the divided dimension before each division."""
        left = list(shape)
        for group, dim in reversed(divisions):
            self._extents.insert(0, left[dim])
            left[dim] = _chunk_sizes(left[dim], dist.get_world_size(group))[dist.get_rank(group)]
        self._rounds: list[_Round] = []

    def gather_matrices(self) -> list[Tensor]:
        """Return the complete matrices that this rank owns."""
        matrices = self._parts
        for division, extent in zip(self._divisions, self._extents, strict=True):
            first = self._dealer.next_owner(division.group, len(matrices))
            self._rounds.append(_Round(division, extent, matrices, first))
            matrices = self._rounds[-1].gather_matrices()
        self._parts = ()
        return list(matrices)

    def return_parts(self, matrices: Sequence[Tensor]) -> list[Tensor]:
        """Return this rank's part of every matrix, sent by the owners of the matrices."""
        parts = list(matrices)
        while self._rounds:
            parts = self._rounds.pop().return_parts(parts)
        return parts


class _Round:
    """Exchange over one division with N ranks: rank (first + k) mod N owns matrix k, gathers it and returns its parts."""

    def __init__(self, division: Division, extent: int, parts: Sequence[Tensor], first: int) -> None:
        (self._group, self._dim), self._matrices = division, len(parts)
        self._ranks, self._rank = dist.get_world_size(self._group), dist.get_rank(self._group)
        self._sizes = _chunk_sizes(extent, self._ranks)
        """Size of each rank's part in the divided dimension."""
        self._owned = [range((r - first) % self._ranks, len(parts), self._ranks) for r in range(self._ranks)]
        """Matrices that each rank owns."""
        self._parts: Sequence[Tensor] = parts
        self._shape = parts[0].shape if parts else torch.Size((0, 0))
        self._like = parts[0].new_empty(0) if parts else torch.empty(0)

    def gather_matrices(self) -> list[Tensor]:
        """Gather the matrices that this rank owns, complete in the divided dimension."""
        if not self._matrices:
            return []  # also on the other ranks of the group, because all have parts of the same matrices
        sent = torch.cat([self._parts[k].reshape(-1) for owned in self._owned for k in owned])
        self._parts = ()
        count = len(self._owned[self._rank])
        received = self._exchange_elements(sent, self._from_owner(), self._to_owner()).split(self._to_owner())
        shaped = [piece.reshape(count, *self._shape_at(r)) for r, piece in enumerate(received)]
        return list(torch.cat(shaped, dim=1 + self._dim).unbind())

    def return_parts(self, matrices: Sequence[Tensor]) -> list[Tensor]:
        """Return this rank's part of every matrix, sent by the owners of the matrices."""
        if not self._matrices:
            return []
        starts = [sum(self._sizes[:r]) for r in range(self._ranks)]
        pieces = [
            matrix.narrow(self._dim, start, size).reshape(-1)
            for start, size in zip(starts, self._sizes, strict=True)
            for matrix in matrices
        ]
        sent = torch.cat(pieces) if pieces else self._like
        received = self._exchange_elements(sent, self._to_owner(), self._from_owner())
        found: dict[int, Tensor] = {}
        for owned, piece in zip(self._owned, received.split(self._from_owner()), strict=True):
            found |= dict(zip(owned, piece.reshape(len(owned), *self._shape), strict=True))
        return [found[k] for k in range(self._matrices)]

    def _shape_at(self, rank: int) -> list[int]:
        """Return the shape of a part on another rank."""
        shape = list(self._shape)
        shape[self._dim] = self._sizes[rank]
        return shape

    def _from_owner(self) -> list[int]:
        """Return the elements of this rank's parts, by owner of the matrices."""
        return [len(owned) * self._shape.numel() for owned in self._owned]

    def _to_owner(self) -> list[int]:
        """Return the elements of this rank's own matrices, by rank that has the parts."""
        return [len(self._owned[self._rank]) * math.prod(self._shape_at(r)) for r in range(self._ranks)]

    def _exchange_elements(self, tensor: Tensor, sent: list[int], received: list[int]) -> Tensor:
        result = tensor.new_empty(sum(received))
        dist.all_to_all_single(result, tensor.contiguous(), received, sent, group=self._group)
        return result


def _chunk_sizes(size: int, ranks: int) -> list[int]:
    """Return the sizes of `torch.chunk`, which FSDP uses: the last ranks may have less or nothing."""
    run = -(-size // ranks)
    return [max(min(size - r * run, run), 0) for r in range(ranks)]
