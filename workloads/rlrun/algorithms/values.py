"""Losses and metrics of a critic: the clipped value loss and the explained variance, on packed tensors."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from rlrun.algorithms.aggregation import divided
from rlrun.algorithms.returns import Moments


class ValueLoss(NamedTuple):
    """Differentiable scalar loss, and the number of loss tokens whose gradient was clipped (detached scalar)."""

    loss: Tensor
    clipped: Tensor


def value_loss(
    values: Tensor,
    *,
    returns: Tensor,
    old_values: Tensor,
    mask: Tensor,
    clip: float | None = None,
    denominator: float | Tensor | None = None,
) -> ValueLoss:
    """Return Σ max((v - R)², (v_clip - R)²) / 2 over the loss tokens, divided by `denominator`.

    v_clip = v_old + clamp(v - v_old, ±clip) is the pessimistic clip of PPO's public implementation (Schulman et al. 2017; Engstrom et al.
    2020, section 3). Without `clip` a token's loss is (v - R)²/2.

    Args:
        values: values v, `[T]`, the only input with a gradient.
        returns: targets R, `[T]`.
        old_values: values v_old at the start of the step, `[T]`.
        mask: loss tokens, `[T]` bool; other tokens have no effect.
        clip: largest change of a value, greater than 0.
        denominator: number of loss tokens of the whole batch. Default: the number in `mask`.

    Raises:
        ValueError: an argument is misaligned or out of range; the message contains its name.
    """
    for name, tensor in {"returns": returns, "old_values": old_values, "mask": mask}.items():
        if tensor.shape != values.shape:
            raise ValueError(f"{name} must have shape {list(values.shape)}, got {list(tensor.shape)}")
    if clip is not None and not clip > 0:
        raise ValueError(f"clip must be greater than 0, got {clip}")
    kept = mask.bool()
    v, target, old = (torch.where(kept, tensor, 0) for tensor in (values, returns.detach(), old_values.detach()))
    loss = (v - target).square()
    clipped = torch.zeros_like(kept)
    if clip is not None:
        bounded = (old + (v - old).clamp(-clip, clip) - target).square()
        clipped = kept & (bounded > loss.detach()) & ((v - old).abs() > clip)
        loss = torch.maximum(loss, bounded)
    total = divided(loss.sum() / 2, kept.sum() if denominator is None else denominator)
    return ValueLoss(total, clipped.sum().to(total.dtype))


def explained_variance(returns: Moments, residuals: Moments) -> float:
    """Return 1 - Var(R - v)/Var(R) from the moments of both over the whole batch.

    1 is a perfect critic; 0 is a critic that predicts only the mean. If all returns are equal, the result is 0.
    """
    variance = float(returns.std) ** 2
    return 1.0 - float(residuals.std) ** 2 / variance if variance > 0 else 0.0
