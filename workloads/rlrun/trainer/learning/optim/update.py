"""Norm, clipping and optimizer step with one synchronization of host and device.

The norm stays on the device. If the optimizer can clip and skip there (torch's fused AdamW does it within its pass over the gradient), the
host reads all values at the end, after it has queued the update. For other optimizers the host needs the norm before the step. The
durations of the parts of a step are also read at the end of the step.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlrun.trainer.learning.optim.host_moments import HostMoments
from rlrun.trainer.modeling.shard import counts_here, local_part


class Stopwatch:
    """Marks between parts of a step. On CUDA they are events in the stream, so that the host does not wait for the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._times: list[float] = []
        self._events: list[torch.cuda.Event] = []
        self.record_mark()

    def record_mark(self) -> None:
        """Mark the end of a part and the start of the next one."""
        if self._device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream(self._device))
            self._events.append(event)
        else:
            self._times.append(time.perf_counter())

    def lap_seconds(self) -> list[float]:
        """Return the seconds between successive marks; on CUDA wait until the device has reached the last one."""
        if self._events:
            self._events[-1].synchronize()
            return [a.elapsed_time(b) / 1e3 for a, b in zip(self._events, self._events[1:], strict=False)]
        return [b - a for a, b in zip(self._times, self._times[1:], strict=False)]


_BLOCK = 2**16
"""Elements per float32 sum of squares on CPU, where torch's norm adds sequentially and longer sums would lose precision."""
_CLIP_EPS = 1e-6


@dataclass(frozen=True)
class Applied:
    """Outcome of `apply_gradient`."""

    grad_norm: float
    """Global norm before clipping."""
    updated: bool
    """False if the gradient was not finite and the update was skipped."""
    values: dict[str, float]
    """Requested scalars on the host."""


def apply_gradient(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    lr: float,
    max_grad_norm: float | None,
    values: Mapping[str, Tensor] | None = None,
) -> Applied:
    """Clip the accumulated gradient and step the optimizer, or skip the step if the gradient is not finite; then delete the gradient.

    Args:
        model: model of this rank; all ranks call this function together.
        optimizer: optimizer of the model's parameters.
        lr: learning rate of this update.
        max_grad_norm: largest global norm, or None for no clipping.
        values: scalars of this rank to copy to the host.
    """
    square = squared_norm(model)
    for parameters in optimizer.param_groups:
        parameters["lr"] = lr
    asked = {"": square, **(values or {})}
    decides = optimizer.inner if isinstance(optimizer, HostMoments) else optimizer
    # A fused optimizer reads clip factor and skip flag on the device: the next kernels are queued
    # before the host knows the norm.
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
    # Also after a skipped update: a gradient that is not finite must not be added to the next one.
    optimizer.zero_grad(set_to_none=True)
    norm = _square_root(found.pop(""))
    return Applied(norm, math.isfinite(norm), found)


def read_scalars(values: Mapping[str, Tensor]) -> dict[str, float]:
    """Copy scalars to the host, one copy per device. This is the only place of a step where the host waits for the device."""
    found: dict[str, float] = {}
    for device in dict.fromkeys(value.device for value in values.values()):
        there = {name: value for name, value in values.items() if value.device == device}
        stacked = torch.stack([value.detach().double() for value in there.values()])
        found |= dict(zip(there, stacked.tolist(), strict=True))
    return {name: found[name] for name in values}


def all_finite(tensors: Sequence[Tensor]) -> bool:
    """Return whether all values of all tensors are finite; the host waits for the device once."""
    if not tensors:
        return True
    return read_scalars({"": torch.stack([torch.isfinite(tensor).all() for tensor in tensors]).all()})[""] == 1


def squared_norm(model: nn.Module) -> Tensor:
    """Return the square of the global L2 norm of the gradient, a float64 scalar on the gradient's device.

    Gradients that several ranks have count once.
    """
    gradients = [
        local_part(parameter.grad)
        for parameter in model.parameters()
        if parameter.grad is not None and counts_here(model, parameter)
    ]
    total = _sum_of_squares(gradients, next(model.parameters()))
    if dist.is_initialized():
        # The sum of squares and not of norms: shards of one gradient are on different ranks.
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
    """Step with the attributes that torch's gradient scaler sets on a fused optimizer: a divisor of the gradient, and a flag to skip the
    step.
    """
    norm = square.sqrt()
    handed = {"found_inf": (~torch.isfinite(norm)).float()}
    if max_grad_norm is not None:
        handed["grad_scale"] = torch.where(norm > max_grad_norm, (norm + _CLIP_EPS) / max_grad_norm, 1.0).float()
    for name, value in handed.items():
        setattr(fused, name, value)
    try:
        optimizer.step()
    finally:
        # Removed, because a later step without these values would use the old ones.
        for name in handed:
            delattr(fused, name)


def _square_root(square: float) -> float:
    return math.sqrt(square) if math.isfinite(square) else square


def _scale_gradients(model: nn.Module, factor: float) -> None:
    gradients = [local_part(parameter.grad) for parameter in model.parameters() if parameter.grad is not None]
    torch._foreach_mul_(gradients, factor)
