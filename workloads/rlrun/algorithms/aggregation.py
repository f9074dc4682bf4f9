"""Aggregation of per-token losses to a scalar: the weight of each token, and the divisor of the sum.

The divisor is a count over the whole batch, so a caller adds it up over all micro-batches and ranks before the first backward pass. The
weight of a token depends on its own sequence only. Therefore the result does not depend on packing and on the distribution over ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from rlrun.algorithms.inputs import LossInputs, checked_lengths
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
    counts = _tokens(kept, sequence_lengths)
    lengths = torch.tensor(sequence_lengths, dtype=torch.long, device=mask.device)
    return kept / counts.clamp(min=1).to(dtype).repeat_interleave(lengths, output_size=len(mask))


def token_weights(aggregation: str, inputs: LossInputs, *, dtype: torch.dtype) -> Tensor:
    """Return `aggregation_weights` of checked inputs without a copy between host and device."""
    if aggregation != "seq_mean_token_mean":
        return inputs.mask.to(dtype)
    return inputs.mask / inputs.on_tokens(inputs.sequence_tokens().clamp(min=1).to(dtype))


def divided(total: Tensor, denominator: float | Tensor) -> Tensor:
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
    counts = _tokens(mask.bool(), sequence_lengths)
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


def _tokens(kept: Tensor, sequence_lengths: Sequence[int]) -> Tensor:
    """Return the number of loss tokens of each sequence, `[S]`."""
    lengths = checked_lengths(sequence_lengths, kept.shape[0])
    totals = torch.cat([kept.new_zeros(1, dtype=torch.long), kept.long().cumsum(0)])
    ends = torch.tensor([0, *lengths], dtype=torch.long, device=kept.device).cumsum(0)
    return totals[ends].diff()
