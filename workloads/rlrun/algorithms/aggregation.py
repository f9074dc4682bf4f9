"""Aggregation of losses per token to one number, and the losses of a critic.

Aggregation of per-token losses to a scalar: the weight of each token, and the divisor of the sum.

The divisor is a count over the whole batch, so a caller adds it up over all micro-batches and ranks before the first backward pass. The
weight of a token depends on its own sequence only. Therefore the result does not depend on packing and on the distribution over ranks.

Losses and metrics of a critic: the clipped value loss and the explained variance, on packed tensors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rlrun.algorithms.loss_inputs import LossInputs, checked_lengths
from rlrun.algorithms.returns import Moments
from rlrun.config.algorithm.names import AGGREGATIONS, check_known


def aggregation_weights(
    aggregation: str, mask: Tensor, sequence_lengths: Sequence[int], *, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return the weights of the tokens' losses, `[T]` of `dtype`: 1, or 1 / (loss tokens of the sequence); 0 outside the mask.

    Args:
        aggregation: key of `AGGREGATIONS`.
        mask: loss mask, `[T]` bool.
        sequence_lengths: S positive lengths with sum T.

    Raises:
        ValueError: an argument is invalid; the message contains its name.
    """
    check_known("aggregation", aggregation, AGGREGATIONS)
    kept = mask.bool()
    if aggregation != "seq_mean_token_mean":
        return kept.to(dtype)
    counts = _sequence_tokens(kept, sequence_lengths)
    lengths = torch.tensor(sequence_lengths, dtype=torch.long, device=mask.device)
    return kept / counts.clamp(min=1).to(dtype).repeat_interleave(lengths, output_size=len(mask))


def token_weights(aggregation: str, inputs: LossInputs, *, dtype: torch.dtype) -> Tensor:
    """Return `aggregation_weights` of checked inputs without a copy between host and device."""
    if aggregation != "seq_mean_token_mean":
        return inputs.mask.to(dtype)
    return inputs.mask / inputs.on_tokens(inputs.sequence_tokens().clamp(min=1).to(dtype))


def divide_total(total: Tensor, denominator: float | Tensor) -> Tensor:
    """Divide `total` by a count that may be 0 if the total is empty; a Python number needs no copy to the device."""
    if isinstance(denominator, Tensor):
        divisor = denominator.detach().to(total.device, total.dtype).reshape(())
        return total / torch.where(divisor > 0, divisor, 1)
    return total / (denominator if denominator > 0 else 1.0)


def aggregation_count(
    aggregation: str, mask: Tensor, sequence_lengths: Sequence[int], *, length: float | None = None
) -> Tensor:
    """Return the contribution of these sequences to the divisor, a scalar: the number of loss tokens, or of sequences with a loss token,
    times a constant `length`.

    Args:
        aggregation: key of `AGGREGATIONS`.
        mask: loss mask, `[T]` bool.
        sequence_lengths: S positive lengths with sum T.
        length: constant number of tokens, for `constant_length` only.

    Raises:
        ValueError: an argument is invalid; the message contains its name.
    """
    check_aggregation(aggregation, length)
    counts = _sequence_tokens(mask.bool(), sequence_lengths)
    if aggregation == "token_mean":
        return counts.sum()
    return (counts > 0).sum() * (1 if length is None else length)


def check_aggregation(aggregation: str, length: float | None) -> None:
    """Raise ValueError for an unknown aggregation, or for a length that is missing, not positive or unused."""
    check_known("aggregation", aggregation, AGGREGATIONS)
    if (length is None) == (aggregation == "constant_length"):
        wrong = "must be given for" if length is None else f"({length}) is not used by"
        raise ValueError(f"aggregation_length {wrong} aggregation {aggregation}")
    if length is not None and (isinstance(length, bool | str) or not 0 < length < math.inf):
        raise ValueError(f"aggregation_length must be a positive number, got {length}")


def _sequence_tokens(kept: Tensor, sequence_lengths: Sequence[int]) -> Tensor:
    """Return the number of loss tokens of each sequence, `[S]`."""
    lengths = checked_lengths(sequence_lengths, kept.shape[0])
    totals = torch.cat([kept.new_zeros(1, dtype=torch.long), kept.long().cumsum(0)])
    ends = torch.tensor([0, *lengths], dtype=torch.long, device=kept.device).cumsum(0)
    return totals[ends].diff()


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
    total = divide_total(loss.sum() / 2, kept.sum() if denominator is None else denominator)
    return ValueLoss(total, clipped.sum().to(total.dtype))


def explained_variance(returns: Moments, residuals: Moments) -> float:
    """Return 1 - Var(R - v)/Var(R) from the moments of both over the whole batch.

    1 is a perfect critic; 0 is a critic that predicts only the mean. If all returns are equal, the result is 0.
    """
    variance = float(returns.std) ** 2
    return 1.0 - float(residuals.std) ** 2 / variance if variance > 0 else 0.0
