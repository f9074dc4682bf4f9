"""Correction of the mismatch between trainer and inference engine: truncated importance weights, and rejection."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rlrun.algorithms.inputs import LossInputs, checked_lengths, prepare
from rlrun.algorithms.kl import bounded_exp
from rlrun.config.algorithm.names import Options, complete_correction


class Corrected(NamedTuple):
    """Factors of the tokens' losses. Both `[T]`, detached; outside the mask the weight is 0 and nothing is dropped."""

    weights: Tensor
    dropped: Tensor
    """Bool: the token, or its whole sequence, was outside the bounds (`mask`) or at one of them (`clamp`)."""


def correct_mismatch(
    logprobs: Tensor, inference_logprobs: Tensor, *, mask: Tensor, sequence_lengths: Sequence[int], **options: object
) -> Corrected:
    """Weights that correct a loss for tokens which another program sampled than the one that trains on them.

    With x = `logprobs` - `inference_logprobs`: the measure of a token is exp(x) (`ratio`), or an estimate of KL(inference || trainer),
    `k1` = -x, `k2` = x²/2, `k3` = exp(x) - 1 - x. At `level: sequence` a sequence has one measure, of the mean (geometric mean of the
    ratios, mean of the estimates), the sum (product of the ratios) or the maximum over its loss tokens.
    `action: clamp` weighs by the ratio, clamped to [low, high] (truncated importance sampling); `mask` weighs by 1 inside of the bounds
    and by 0 outside (rejection). With a `weight`, `mask` weighs what it keeps by a ratio min(r, cap): r = exp(x) of the token
    (`token`), exp(sum of x) (`sequence`) or exp(mean of x) (`geometric`) over the sequence's loss tokens: AReaL's rejection sampling
    with action mask; verl's rollout correction with `rollout_rs` and `rollout_is` together. That a token of it is
    dropped changes a sequence's ratio nothing.

    Args:
        logprobs: `[T]`, of the trainer: the proximal policy's, or the current one's.
        inference_logprobs: `[T]`, as sampled.
        mask: `[T]` bool, the loss mask.
        sequence_lengths: S positive lengths that add up to T.
        options: `action`, `weight`, `cap`, `level`, `measure`, `reduce`, `low`, `high`, see `CORRECTION_OPTIONS`.

    Raises:
        ValueError: names the argument that is misaligned, not finite, unknown or out of range.
    """
    complete = complete_correction(options)
    checked_lengths(sequence_lengths, logprobs.shape[0])
    inputs = prepare(
        logprobs.detach(),
        inference_logprobs=inference_logprobs,
        advantages=torch.zeros_like(logprobs),
        mask=mask,
        sequence_lengths=sequence_lengths,
        proximal_logprobs=None,
        reference_logprobs=None,
        denominator=None,
    )
    return corrected(inputs, complete)


def corrected(inputs: LossInputs, options: Options) -> Corrected:
    """`correct_mismatch` on checked inputs and complete options; o - i where proximal log-probs are given, else t - i."""
    if options["action"] == "none":
        return Corrected(inputs.mask.to(inputs.inference_logprobs.dtype), torch.zeros_like(inputs.mask))
    trained = inputs.logprobs.detach() if inputs.proximal_logprobs is None else inputs.proximal_logprobs
    log_ratio = trained - inputs.inference_logprobs
    measure = _measure(log_ratio, options["measure"])
    if options["level"] == "sequence":
        measure = inputs.on_tokens(_of_sequence(inputs, log_ratio, measure, options))
    low, high = options["low"], options["high"]
    outside = ((measure < low) | (measure > high)) & inputs.mask
    if options["action"] == "clamp":
        weights = measure.clamp(low, high)
    else:
        weights = torch.where(outside, 0, _kept_weights(inputs, log_ratio, options))
    return Corrected(torch.where(inputs.mask, weights, 0), outside)


def _kept_weights(inputs: LossInputs, log_ratio: Tensor, options: Options) -> Tensor:
    """`[T]`, what `mask` multiplies a token by that it keeps."""
    level, cap = options["weight"], options["cap"]
    if level == "none":
        return torch.ones_like(log_ratio)
    if level != "token":
        total = inputs.sequence_sum(log_ratio)
        mean = total / inputs.sequence_tokens().clamp(min=1)
        log_ratio = inputs.on_tokens(mean if level == "geometric" else total)
    ratio = bounded_exp(log_ratio)
    return ratio if cap is None else ratio.clamp(max=cap)


def _measure(log_ratio: Tensor, kind: str) -> Tensor:
    if kind == "ratio":
        return bounded_exp(log_ratio)
    if kind == "k1":
        return -log_ratio
    if kind == "k2":
        return log_ratio.square() / 2.0
    return bounded_exp(log_ratio) - 1.0 - log_ratio


def _of_sequence(inputs: LossInputs, log_ratio: Tensor, measure: Tensor, options: Options) -> Tensor:
    """`[num_sequences]`; the mean and the sum of ratios are taken of their logarithms."""
    if options["reduce"] == "max":
        lowest = torch.where(inputs.mask, measure, -torch.inf)
        start = measure.new_full((inputs.num_sequences,), -torch.inf)
        largest = start.scatter_reduce(0, inputs.sequence_ids, lowest, "amax")
        return torch.where(torch.isfinite(largest), largest, 0)
    is_ratio = options["measure"] == "ratio"
    total = inputs.sequence_sum(log_ratio if is_ratio else measure)
    if options["reduce"] == "mean":
        total = total / inputs.sequence_tokens().clamp(min=1)
    return bounded_exp(total) if is_ratio else total
