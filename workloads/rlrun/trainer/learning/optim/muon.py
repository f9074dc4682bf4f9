"""Muon, and optimizer steps over a part of the parameters.

Muon orthogonalizes momentum in batches of equal matrices; the ranks that share the matrices also share the work.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from rlrun.trainer.modeling.shard import local_part

Visit = Callable[[Sequence[nn.Parameter]], Iterator[Sequence[nn.Parameter]]]
"""Function that iterates over parts of parameters; the states of a part are on the device until the next part is requested."""


def at_once(parameters: Sequence[nn.Parameter]) -> Iterator[Sequence[nn.Parameter]]:
    """Return all parameters as one part, because their states are always on the device."""
    yield parameters


def step_part(optimizer: torch.optim.Optimizer, groups: Sequence[dict[str, Any]], part: Sequence[nn.Parameter]) -> None:
    """Update only the parameters of `part`; for optimizers that treat each parameter independently.

    Args:
        optimizer: optimizer, whose groups are `groups` afterwards.
        groups: groups with all parameters.
        part: parameters to update.
    """
    chosen = set(map(id, part))
    rest = [{**group, "params": [p for p in group["params"] if id(p) in chosen]} for group in groups]
    optimizer.param_groups = [group for group in rest if group["params"]]
    try:
        if optimizer.param_groups:
            optimizer.step()
    finally:
        optimizer.param_groups = list(groups)


NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""Coefficients of the quintic iteration (Jordan, 2024, https://kellerjordan.github.io/posts/muon)."""
NEWTON_SCHULZ_STEPS = 5
_NORM_EPS = 1e-7
BATCH_BYTES = 2**30
"""Limit of bytes of float32 matrices that are orthogonalized together; a batch has at least one matrix."""


class Muon(torch.optim.Optimizer):  # type: ignore[misc]  # torch is not typed for mypy
    """Momentum orthogonalized by Newton-Schulz (Jordan et al., 2024) for matrices, AdamW for everything else.

    With gradient G, momentum μ and shape `[..., m, n]` (leading dimensions contain independent matrices, such as experts):

        B ← μ B + (1 - μ) G        U = NS((1 - μ) G + μ B)        W ← W (1 - lr·decay) - lr·0.2·√max(m, n)·U

    The factor gives the update the size of AdamW's (Liu et al., 2025, arXiv:2502.16982), so that all parameters share one learning rate.
    Of the N ranks that shard a matrix, one gathers and orthogonalizes it and sends the parts back; the matrices are distributed over the
    ranks. Momentum stays sharded like the matrix.
    """

    def __init__(
        self, matrices: list[nn.Parameter], others: list[nn.Parameter], *, momentum: float, adamw: dict[str, Any]
    ) -> None:
        shared = {"lr": adamw["lr"], "weight_decay": adamw["weight_decay"]}
        super().__init__([{"params": matrices, "matrices": True, "momentum": momentum, **shared}], {})
        self._adamw = torch.optim.AdamW(others, **adamw)
        self.add_param_group({**self._adamw.param_groups[0], "matrices": False})
        self.iterate_buckets: Visit = at_once
        """Iteration over parts whose momentum and moments are on the device."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update every parameter that has a gradient."""
        loss = None if closure is None else closure()
        for group in self.param_groups:
            if group["matrices"]:
                self._update_parameters([p for p in group["params"] if p.grad is not None], group)
        # Loading a state replaces groups and state, so the inner optimizer gets the current ones.
        groups = [group for group in self.param_groups if not group["matrices"]]
        self._adamw.state = self.state
        for part in self.iterate_buckets([p for group in groups for p in group["params"] if p.grad is not None]):
            step_part(self._adamw, groups, part)
        return loss

    def _update_parameters(self, parameters: list[nn.Parameter], group: dict[str, Any]) -> None:
        if not parameters:
            return
        momentum, lr = group["momentum"], group["lr"]
        directions: list[Tensor] = []
        for part in self.iterate_buckets(parameters):
            for parameter in part:
                if "momentum_buffer" not in self.state[parameter]:
                    self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter.grad)
            buffers = [local_part(self.state[parameter]["momentum_buffer"]) for parameter in part]
            gradients = [local_part(parameter.grad) for parameter in part]
            torch._foreach_lerp_(buffers, gradients, 1 - momentum)
            directions += torch._foreach_lerp(gradients, buffers, momentum)
        # For all matrices at once: exchanges and batches are larger, and each rank has the same
        # order of collectives.
        updates = orthogonalized_parts(parameters, directions)
        weights = [local_part(parameter.detach()) for parameter in parameters]
        torch._foreach_mul_(updates, [-lr * 0.2 * math.sqrt(max(parameter.shape[-2:])) for parameter in parameters])
        torch._foreach_mul_(weights, 1 - lr * group["weight_decay"])
        torch._foreach_add_(weights, updates)


def orthogonalized_parts(parameters: Sequence[Tensor], directions: Sequence[Tensor]) -> list[Tensor]:
    """Return this rank's part of the orthogonalized matrix of each parameter, from the same part of its direction.

    Args:
        parameters: parameters whose sharding defines the other parts; in the same order on every rank.
        directions: parts of this rank.
    """
    # Classify the matrices: complete on this rank, sharded by rows (one rank gathers each), or sharded otherwise (all ranks gather).
    found: list[Tensor | None] = [None] * len(parameters)
    whole: list[int] = []
    dealt: dict[tuple[Any, ...], list[int]] = {}
    for index, parameter in enumerate(parameters):
        shared = _shared_rows(parameter)
        if shared is not None:
            dealt.setdefault((shared, tuple(parameter.shape)), []).append(index)
        elif _has_whole_matrices(parameter):
            whole.append(index)
        else:
            found[index] = _gather_part(parameter, directions[index])
    # Exchange first, so that complete and gathered matrices are orthogonalized in common batches.
    rounds = [_Round(group, shape, [directions[i] for i in of]) for (group, shape), of in dealt.items()]
    mine = [round_.gather_matrices() for round_ in rounds]
    matrices = orthogonalized_all([*(directions[i] for i in whole), *(matrix for own in mine for matrix in own)])
    # Keep the results of complete matrices, and return the parts of the others to their ranks.
    for index, matrix in zip(whole, matrices, strict=False):
        found[index] = matrix
    taken = len(whole)
    for round_, own, of in zip(rounds, mine, dealt.values(), strict=True):
        parts = round_.return_parts(matrices[taken : taken + len(own)])
        taken += len(own)
        for index, part in zip(of, parts, strict=True):
            found[index] = part
    return [part for part in found if part is not None]


def orthogonalized_all(matrices: Sequence[Tensor]) -> list[Tensor]:
    """Orthogonalize matrices in batches of equal shapes; a tall matrix is batched as its wide transpose."""
    found: dict[int, Tensor] = {}
    alike: dict[tuple[int, int], list[int]] = {}
    for index, matrix in enumerate(matrices):
        alike.setdefault((min(matrix.shape[-2:]), max(matrix.shape[-2:])), []).append(index)
    for members in alike.values():
        for batch in _batch_members(members, [matrices[i].numel() * 4 for i in members]):
            wide = [_turn_matrix(matrices[i]) for i in batch]
            stacked = torch.cat([matrix.reshape(-1, *matrix.shape[-2:]) for matrix in wide])
            made = orthogonalize(stacked).split([matrix.shape[:-2].numel() for matrix in wide])
            for i, matrix, part in zip(batch, wide, made, strict=True):
                whole = part.reshape(matrix.shape)
                found[i] = whole.mT if _is_tall(matrices[i]) else whole
    return [found[index].contiguous() for index in range(len(matrices))]


def orthogonalize(matrix: Tensor) -> Tensor:
    """Approximate the nearest orthogonal matrix: the singular values of `[..., m, n]` float32 become 0.7 to 1.2.

    Computes five steps of X ← aX + (bA + cA²)X with A = XXᵀ, in bfloat16 on CUDA and in float32 elsewhere; zeros stay zeros.
    """
    a, b, c = NEWTON_SCHULZ
    x = _turn_matrix(matrix).reshape(-1, *sorted(matrix.shape[-2:]))
    # The Frobenius norm is at least the largest singular value, so the iteration starts in its
    # range of convergence.
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=_NORM_EPS)
    x = x.bfloat16() if x.is_cuda else x
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    x = x.reshape(_turn_matrix(matrix).shape)
    return (x.mT if _is_tall(matrix) else x).to(matrix.dtype)


class _Round:
    """Exchange of matrices of one shape, sharded by rows over N ranks: rank k mod N owns matrix k, gathers it and returns its parts."""

    def __init__(self, group: dist.ProcessGroup, shape: tuple[int, ...], parts: Sequence[Tensor]) -> None:
        self._group, self._shape, self._parts = group, shape, parts
        self._ranks, self._rank = dist.get_world_size(group), dist.get_rank(group)
        # The division of FSDP (`torch.chunk`): the last ranks may have fewer rows or none.
        run = -(-shape[0] // self._ranks)
        self._rows = [max(min(shape[0] - r * run, run), 0) for r in range(self._ranks)]
        """Number of rows of each rank, divided like `torch.chunk`."""
        self._counts = [len(range(r, len(parts), self._ranks)) for r in range(self._ranks)]
        """Number of matrices that each rank owns."""

    def gather_matrices(self) -> list[Tensor]:
        """Gather the complete matrices that this rank owns."""
        sent = [self._parts[k].reshape(-1) for r in range(self._ranks) for k in range(r, len(self._parts), self._ranks)]
        received = self._exchange_elements(torch.cat(sent), self._from_owner(), self._to_owner())
        pieces = received.split(self._to_owner())
        count = self._counts[self._rank]
        shaped = [piece.reshape(count, rows, *self._shape[1:]) for piece, rows in zip(pieces, self._rows, strict=True)]
        return list(torch.cat(shaped, dim=1).unbind())

    def return_parts(self, matrices: Sequence[Tensor]) -> list[Tensor]:
        """Return this rank's part of every matrix, sent by the owners of the matrices."""
        pieces = [part for r in range(self._ranks) for part in self._rows_of(matrices, r)]
        like = self._parts[0]
        sent = torch.cat(pieces) if pieces else like.new_empty(0)
        received = self._exchange_elements(sent, self._to_owner(), self._from_owner())
        found: dict[int, Tensor] = {}
        for r, piece in enumerate(received.split(self._from_owner())):
            own = piece.reshape(self._counts[r], *like.shape)
            found |= dict(zip(range(r, len(self._parts), self._ranks), own, strict=True))
        return [found[k] for k in range(len(self._parts))]

    def _rows_of(self, matrices: Iterable[Tensor], rank: int) -> list[Tensor]:
        start = sum(self._rows[:rank])
        return [matrix[start : start + self._rows[rank]].reshape(-1) for matrix in matrices]

    def _from_owner(self) -> list[int]:
        """Return the elements of this rank's parts, by owner of the matrices."""
        return [count * self._parts[0].numel() for count in self._counts]

    def _to_owner(self) -> list[int]:
        """Return the elements of this rank's own matrices, by rank that has the parts."""
        width = math.prod(self._shape[1:])
        return [self._counts[self._rank] * rows * width for rows in self._rows]

    def _exchange_elements(self, tensor: Tensor, sent: list[int], received: list[int]) -> Tensor:
        result = tensor.new_empty(sum(received))
        dist.all_to_all_single(result, tensor.contiguous(), received, sent, group=self._group)
        return result


def _shared_rows(parameter: Tensor) -> dist.ProcessGroup | None:
    """Return the ranks that shard a matrix by rows, or None for another sharding or none."""
    if not isinstance(parameter, DTensor) or parameter.ndim != 2:
        return None
    divided = _dividing_dimensions(parameter)
    if len(divided) != 1 or type(parameter.placements[divided[0]]) is not Shard or parameter.placements[divided[0]].dim:
        return None
    return parameter.device_mesh.get_group(divided[0])


def _has_whole_matrices(parameter: Tensor) -> bool:
    """Return whether this rank's part consists of complete matrices, such as its experts."""
    if not isinstance(parameter, DTensor):
        return True
    return all(
        type(parameter.placements[at]) is Shard and parameter.placements[at].dim < parameter.ndim - 2
        for at in _dividing_dimensions(parameter)
    )


def _dividing_dimensions(parameter: DTensor) -> list[int]:
    """Return the dimensions of the mesh that shard the parameter."""
    sizes = zip(parameter.placements, parameter.device_mesh.shape, strict=True)
    return [at for at, (placement, size) in enumerate(sizes) if size > 1 and not isinstance(placement, Replicate)]


def _gather_part(parameter: DTensor, direction: Tensor) -> Tensor:
    """Return the part of a matrix with any other sharding: every rank gathers and orthogonalizes it."""
    mesh, placements = parameter.device_mesh, parameter.placements
    shape, stride = parameter.shape, parameter.stride()
    divided = DTensor.from_local(direction, mesh, placements, run_check=False, shape=shape, stride=stride)
    whole = orthogonalize(divided.full_tensor())
    # Every rank has computed the same matrix, so each takes its part without communication.
    return local_part(distribute_tensor(whole, mesh, placements, src_data_rank=None))


def _batch_members(members: Sequence[int], sizes: Sequence[int]) -> list[list[int]]:
    """Divide members into batches of at most `BATCH_BYTES`."""
    found: list[list[int]] = []
    room = 0
    for member, size in zip(members, sizes, strict=True):
        if not found or size > room:
            found.append([])
            room = BATCH_BYTES
        found[-1].append(member)
        room -= size
    return found


def _is_tall(matrix: Tensor) -> bool:
    return bool(matrix.shape[-2] > matrix.shape[-1])


def _turn_matrix(matrix: Tensor) -> Tensor:
    return matrix.mT if _is_tall(matrix) else matrix
