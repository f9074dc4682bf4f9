"""Off-policy correction: importance weights or rejection of tokens, and log-probs of the proximal policy.

The weights correct the mismatch between trainer and inference engine. The proximal policy is the center of a trust region.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rlrun.algorithms.kl import bounded_exp
from rlrun.algorithms.loss_inputs import LossBatch, LossInputs, checked_lengths, prepare_inputs
from rlrun.config.algorithm.names import PROXIMAL_METHODS, Options, check_known, complete_correction


class Corrected(NamedTuple):
    """Weights of the tokens' losses, and dropped tokens. Both are `[T]` and detached; outside the mask the weight is 0 and `dropped` is
    false.
    """

    weights: Tensor
    dropped: Tensor
    """Boolean: the measure of the token, or of its sequence, was outside the bounds."""


def correct_mismatch(
    logprobs: Tensor, inference_logprobs: Tensor, *, mask: Tensor, sequence_lengths: Sequence[int], **options: object
) -> Corrected:
    """Return weights that correct the loss for the difference between the engine, which sampled the tokens, and the trainer.

    Let x = `logprobs` - `inference_logprobs`. The measure of a token is exp(x) (`ratio`), or an estimate of KL(inference || trainer):
    `k1` = -x, `k2` = x²/2, `k3` = exp(x) - 1 - x. With `level: sequence` each sequence has one measure over its loss tokens: the mean
    (geometric mean of ratios, mean of estimates), the sum (product of ratios) or the maximum.

    `action: clamp` uses the ratio, clamped to [low, high], as weight (truncated importance sampling). `action: mask` uses weight 1 inside
    the bounds and 0 outside (rejection). With a `weight`, `mask` multiplies the kept tokens by min(r, cap), with r = exp(x) of the token
    (`token`), exp(sum of x) (`sequence`) or exp(mean of x) (`geometric`) over the loss tokens of the sequence, including dropped ones.
    This equals AReaL's rejection sampling with action mask, and verl's rollout correction with both `rollout_rs` and `rollout_is`.

    Args:
        logprobs: log-probs of the proximal or the current policy in the trainer, `[T]`.
        inference_logprobs: log-probs at sampling, `[T]`.
        mask: loss mask, `[T]` bool.
        sequence_lengths: S positive lengths with sum T.
        options: `action`, `weight`, `cap`, `level`, `measure`, `reduce`, `low`, `high`, see `CORRECTION_OPTIONS`.

    Raises:
        ValueError: an argument is misaligned, not finite, unknown or out of range; the message contains its name.
    """
    complete = complete_correction(options)
    checked_lengths(sequence_lengths, logprobs.shape[0])
    batch = LossBatch(inference_logprobs, torch.zeros_like(logprobs), mask, sequence_lengths)
    inputs = prepare_inputs(logprobs.detach(), batch)
    return correct_inputs(inputs, complete)


def correct_inputs(inputs: LossInputs, options: Options) -> Corrected:
    """Apply `correct_mismatch` to checked inputs and complete options, with x = o - i if proximal log-probs are given, else t - i."""
    if options["action"] == "none":
        return Corrected(inputs.mask.to(inputs.inference_logprobs.dtype), torch.zeros_like(inputs.mask))
    trained = inputs.logprobs.detach() if inputs.proximal_logprobs is None else inputs.proximal_logprobs
    log_ratio = trained - inputs.inference_logprobs
    measure = _token_measure(log_ratio, options["measure"])
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
    """Return the weights of kept tokens for `action: mask`, `[T]`."""
    level, cap = options["weight"], options["cap"]
    if level == "none":
        return torch.ones_like(log_ratio)
    if level != "token":
        total = inputs.sequence_sum(log_ratio)
        mean = total / inputs.sequence_tokens().clamp(min=1)
        log_ratio = inputs.on_tokens(mean if level == "geometric" else total)
    ratio = bounded_exp(log_ratio)
    return ratio if cap is None else ratio.clamp(max=cap)


def _token_measure(log_ratio: Tensor, kind: str) -> Tensor:
    if kind == "ratio":
        return bounded_exp(log_ratio)
    if kind == "k1":
        return -log_ratio
    if kind == "k2":
        return log_ratio.square() / 2.0
    return bounded_exp(log_ratio) - 1.0 - log_ratio


def _of_sequence(inputs: LossInputs, log_ratio: Tensor, measure: Tensor, options: Options) -> Tensor:
    """Return one measure per sequence, `[num_sequences]`; mean and sum of ratios are computed from their logarithms."""
    if options["reduce"] == "max":
        largest = inputs.sequence_max(measure)
        return torch.where(torch.isfinite(largest), largest, 0)
    is_ratio = options["measure"] == "ratio"
    total = inputs.sequence_sum(log_ratio if is_ratio else measure)
    if options["reduce"] == "mean":
        total = total / inputs.sequence_tokens().clamp(min=1)
    return bounded_exp(total) if is_ratio else total


def proximal_logprobs(
    method: str,
    logprobs: Tensor,
    inference_logprobs: Tensor,
    *,
    versions: Tensor | None = None,
    policy_version: int | None = None,
    checked: bool = False,
) -> Tensor:
    """Return the log-probs o of the proximal policy, `[T]`, detached.

    Args:
        method: `inference`: o = i. `recompute`: o = `logprobs`, computed at the start of the step. `log_linear`: interpolation by
            versions, o = i + α(t - i) with α = clamp((v_θ - 1 - v_b)/(v_θ - v_b), 0, 1), and α = 0 if v_θ = v_b (AReaL).
        logprobs: log-probs t of the trained policy, `[T]`.
        inference_logprobs: log-probs i at sampling, `[T]`.
        versions: version v_b that sampled each token, `[T]` integers; for `log_linear`.
        policy_version: trained version v_θ; for `log_linear`.
        checked: true if the caller has checked that no version is newer than the policy.

    Raises:
        ValueError: the method is unknown, shapes differ, or versions are missing or newer than the policy.
    """
    check_known("method", method, PROXIMAL_METHODS)
    if logprobs.shape != inference_logprobs.shape:
        raise ValueError(
            f"inference_logprobs has shape {tuple(inference_logprobs.shape)}, logprobs has {tuple(logprobs.shape)}"
        )
    t, i = logprobs.detach(), inference_logprobs.detach()
    if method == "inference":
        return i
    if method == "recompute":
        return t
    if versions is None or policy_version is None:
        missing = "versions" if versions is None else "policy_version"
        raise ValueError(f"{missing} must be given for method log_linear")
    if versions.shape != t.shape:
        raise ValueError(f"versions has shape {tuple(versions.shape)}, logprobs has {tuple(t.shape)}")
    age = policy_version - versions.to(t.device)
    if not checked and bool((age < 0).any()):
        raise ValueError(f"versions must be at most policy_version ({policy_version}), got {int(versions.max())}")
    dtype = torch.promote_types(t.dtype, torch.float32)
    share = torch.where(age > 0, (age - 1) / age.clamp(min=1), 0).clamp(0, 1).to(dtype)
    return i.to(dtype) + share * (t.to(dtype) - i.to(dtype))
