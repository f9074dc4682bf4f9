"""Muon, and optimizer steps over a part of the parameters.

Muon orthogonalizes momentum in batches of equal matrices; the ranks that share the matrices also share the work.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from rlrun.trainer.learning.optim.matrix_exchange import Dealer, Division, dividing_ranks, matrix_divisions
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
"""Limit of bytes of float32 matrices that a rank exchanges or orthogonalizes together; at least one parameter or matrix."""


class Muon(torch.optim.Optimizer):  # type: ignore[misc]  # torch is not typed for mypy
    """Momentum orthogonalized by Newton-Schulz (Jordan et al., 2024) for matrices, AdamW for everything else.

    With gradient G, momentum μ and shape `[..., m, n]` (leading dimensions contain independent matrices, such as experts):

        B ← μ B + (1 - μ) G        U = NS((1 - μ) G + μ B)        W ← W (1 - lr·decay) - lr·0.2·√max(m, n)·U

    The factor gives the update the size of AdamW's (Liu et al., 2025, arXiv:2502.16982), so that all parameters share one learning rate.
    Of the N ranks that divide a matrix, one gathers and orthogonalizes it and sends the parts back; the matrices, experts one by one, are
    dealt to the ranks (`matrix_exchange`). Momentum stays sharded like the matrix.
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
        weights = [local_part(parameter.detach()) for parameter in parameters]
        torch._foreach_mul_(weights, 1 - lr * group["weight_decay"])
        # Many matrices at once: exchanges and batches are larger. Every rank makes the same divisions,
        # so that each rank has the same order of collectives.
        for members in _batch_members(range(len(parameters)), [_bytes_on_rank(parameter) for parameter in parameters]):
            updates = orthogonalized_parts([parameters[i] for i in members], [directions[i] for i in members])
            factors = [-lr * 0.2 * math.sqrt(max(parameters[i].shape[-2:])) for i in members]
            torch._foreach_mul_(updates, factors)
            torch._foreach_add_([weights[i] for i in members], updates)


def orthogonalized_parts(parameters: Sequence[Tensor], directions: Sequence[Tensor]) -> list[Tensor]:
    """Return this rank's part of the orthogonalized matrices of each parameter, from the same part of its direction.

    Args:
        parameters: parameters whose sharding defines the other parts; in the same order on every rank.
        directions: parts of this rank.
    """
    # Classify the parameters: complete matrices on this rank, divided matrices (one rank gathers each), or another sharding (all gather).
    found: list[Tensor | None] = [None] * len(parameters)
    complete: list[int] = []
    alike: dict[tuple[tuple[Division, ...], tuple[int, int]], list[int]] = {}
    for index, parameter in enumerate(parameters):
        divisions = matrix_divisions(parameter)
        if divisions is None:
            found[index] = _gather_part(parameter, directions[index])
        elif divisions:
            alike.setdefault((divisions, (parameter.shape[-2], parameter.shape[-1])), []).append(index)
        else:
            complete.append(index)
    # Exchange first, so that complete and gathered matrices are orthogonalized in common batches.
    dealer = Dealer()
    deals = [
        dealer.deal(divisions, shape, [part for i in members for part in _split_matrices(directions[i])])
        for (divisions, shape), members in alike.items()
    ]
    owned = [deal.gather_matrices() for deal in deals]
    matrices = orthogonalized_all([*(directions[i] for i in complete), *(matrix for own in owned for matrix in own)])
    # Keep the results of complete matrices, and return the parts of the others to their ranks.
    for index, matrix in zip(complete, matrices, strict=False):
        found[index] = matrix
    taken = len(complete)
    for deal, own, members in zip(deals, owned, alike.values(), strict=True):
        parts = iter(deal.return_parts(matrices[taken : taken + len(own)]))
        taken += len(own)
        for index in members:
            found[index] = _join_matrices(parts, directions[index])
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


def _gather_part(parameter: DTensor, direction: Tensor) -> Tensor:
    """Return the part of matrices with a sharding that no layout of the trainer has: every rank gathers and orthogonalizes them."""
    mesh, placements = parameter.device_mesh, parameter.placements
    shape, stride = parameter.shape, parameter.stride()
    divided = DTensor.from_local(direction, mesh, placements, run_check=False, shape=shape, stride=stride)
    whole = orthogonalize(divided.full_tensor())
    # Every rank has computed the same matrix, so each takes its part without communication.
    return local_part(distribute_tensor(whole, mesh, placements, src_data_rank=None))


def _bytes_on_rank(parameter: Tensor) -> int:
    """Return the bytes of a rank's share of the complete matrices, equal on all ranks."""
    size: int = 4 * parameter.numel()
    return -(-size // dividing_ranks(parameter)) if isinstance(parameter, DTensor) else size


def _split_matrices(tensor: Tensor) -> tuple[Tensor, ...]:
    """Split `[..., m, n]` into its matrices `[m, n]`; m and n may be 0."""
    matrices: tuple[Tensor, ...] = tensor.reshape(tensor.shape[:-2].numel(), *tensor.shape[-2:]).unbind()
    return matrices


def _join_matrices(matrices: Iterator[Tensor], like: Tensor) -> Tensor:
    """Undo `_split_matrices`: join the next matrices to a tensor of the shape of `like`."""
    taken = [next(matrices) for _ in range(like.shape[:-2].numel())]
    if len(taken) == 1:  # without a copy
        return taken[0].reshape(like.shape)
    return torch.stack(taken).reshape(like.shape) if taken else torch.empty_like(like)


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
