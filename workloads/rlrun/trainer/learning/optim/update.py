"""From the accumulated gradient to the update, with one look of the host at the device.

The norm stays on the device. Where the optimizer can clip and skip there (torch's fused AdamW does, within its own pass over the
gradient), the host asks for everything at the end, after it has queued the update; for others it has to know the norm before.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlrun.trainer.learning.optim.host_moments import HostMoments
from rlrun.trainer.modeling.shard import counts_here, local_part

_BLOCK = 2**16
"""Elements whose squares are added in float32 on CPU, where torch's norm adds one after the other: more of them would lose digits."""
_CLIP_EPS = 1e-6


@dataclass(frozen=True)
class Applied:
    """Outcome of `apply_gradient`."""

    grad_norm: float
    """The global norm before clipping."""
    updated: bool
    """False where the gradient was not finite and nothing was changed."""
    values: dict[str, float]
    """The numbers that were given, on the host."""


def apply_gradient(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    lr: float,
    max_grad_norm: float | None,
    values: Mapping[str, Tensor] | None = None,
) -> Applied:
    """Clip the accumulated gradient and take the optimizer's step, unless the gradient is not finite; it is gone afterwards.

    Args:
        model: every rank calls this with its part of it.
        optimizer: of its parameters.
        lr: rate of this update.
        max_grad_norm: largest global norm; None: any.
        values: scalars of this rank that the host wants to know.
    """
    square = squared_norm(model)
    for parameters in optimizer.param_groups:
        parameters["lr"] = lr
    asked = {"": square, **(values or {})}
    decides = optimizer.inner if isinstance(optimizer, HostMoments) else optimizer
    if _decides_on_device(decides):
        _update_if_finite(optimizer, decides, square, max_grad_norm)
        found = read_scalars(asked)
    else:
        found = read_scalars(asked)
        norm = _square_root(found[""])
        if math.isfinite(norm):
            if max_grad_norm is not None and norm > max_grad_norm:
                _scale_gradients(model, max_grad_norm / (norm + _CLIP_EPS))
            optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    norm = _square_root(found.pop(""))
    return Applied(norm, math.isfinite(norm), found)


def read_scalars(values: Mapping[str, Tensor]) -> dict[str, float]:
    """Scalars from the device, by one copy for each device; the only place of a step where the host waits for it."""
    found: dict[str, float] = {}
    for device in dict.fromkeys(value.device for value in values.values()):
        there = {name: value for name, value in values.items() if value.device == device}
        stacked = torch.stack([value.detach().double() for value in there.values()])
        found |= dict(zip(there, stacked.tolist(), strict=True))
    return {name: found[name] for name in values}


def all_finite(tensors: Sequence[Tensor]) -> bool:
    """True if no value of any of the tensors is infinite or no number; the host waits for the device once."""
    if not tensors:
        return True
    return read_scalars({"": torch.stack([torch.isfinite(tensor).all() for tensor in tensors]).all()})[""] == 1


def squared_norm(model: nn.Module) -> Tensor:
    """Square of the global L2 norm of the gradient over all parameters and ranks, a float64 scalar on the gradient's device.

    What several ranks hold counts once.
    """
    gradients = [
        local_part(parameter.grad)
        for parameter in model.parameters()
        if parameter.grad is not None and counts_here(model, parameter)
    ]
    total = _sum_of_squares(gradients, next(model.parameters()))
    if dist.is_initialized():
        dist.all_reduce(total)
    return total


def _sum_of_squares(gradients: Sequence[Tensor], like: Tensor) -> Tensor:
    parts = [
        part
        for gradient in gradients
        for part in ([gradient] if gradient.is_cuda else gradient.flatten().split(_BLOCK))
        if part.numel()
    ]
    if not parts:
        return torch.zeros((), dtype=torch.float64, device=local_part(like.detach()).device)
    return torch.stack(torch._foreach_norm(parts)).double().square().sum()


def _decides_on_device(optimizer: torch.optim.Optimizer) -> bool:
    return isinstance(optimizer, torch.optim.AdamW) and all(group["fused"] for group in optimizer.param_groups)


def _update_if_finite(
    optimizer: torch.optim.Optimizer, fused: torch.optim.Optimizer, square: Tensor, max_grad_norm: float | None
) -> None:
    """Step by the arguments that torch's gradient scaler hands to a fused optimizer: a divisor, and whether to leave it."""
    norm = square.sqrt()
    handed = {"found_inf": (~torch.isfinite(norm)).float()}
    if max_grad_norm is not None:
        handed["grad_scale"] = torch.where(norm > max_grad_norm, (norm + _CLIP_EPS) / max_grad_norm, 1.0).float()
    for name, value in handed.items():
        setattr(fused, name, value)
    try:
        optimizer.step()
    finally:
        for name in handed:
            delattr(fused, name)


def _square_root(square: float) -> float:
    return math.sqrt(square) if math.isfinite(square) else square


def _scale_gradients(model: nn.Module, factor: float) -> None:
    gradients = [local_part(parameter.grad) for parameter in model.parameters() if parameter.grad is not None]
    torch._foreach_mul_(gradients, factor)
