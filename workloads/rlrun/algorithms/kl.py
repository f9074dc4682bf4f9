"""Estimates of the KL divergence between two policies per sampled token."""

from __future__ import annotations

import torch
from torch import Tensor

from rlrun.config.algorithm.names import KL_KINDS, check_known

LARGEST_EXPONENT = 80.0
"""Limit of exponents. e^80 is far below the largest fp32 number, so sums and products of bounded ratios stay finite."""


def bounded_exp(exponent: Tensor) -> Tensor:
    """Return e^x with value and gradient limited to those at x = 80, so that neither overflows to inf or to inf·0 = nan.

    A plain clamp has gradient 0 above the limit, which can invert the sign of the gradient of a sum.
    """
    value = exponent.detach().clamp(max=LARGEST_EXPONENT).exp()
    return value * (1.0 + (exponent - exponent.detach()))


def mismatch_kl(logprobs: Tensor, inference_logprobs: Tensor) -> Tensor:
    """Return ρ - log ρ - 1 per token with ρ = exp(logprobs - inference_logprobs); it is >= 0, and 0 if both agree.

    Both arguments have the same shape `[...]` and are natural logarithms. The result estimates KL(inference || trainer) on tokens that
    the inference policy sampled (Schulman, "Approximating KL Divergence", k3).
    """
    log_ratio = _difference("inference_logprobs", logprobs, inference_logprobs)
    return bounded_exp(log_ratio) - log_ratio - 1.0


def kl_estimate(
    kind: str, logprobs: Tensor, reference_logprobs: Tensor, *, inference_logprobs: Tensor | None = None
) -> Tensor:
    """Estimate KL(current || reference) per sampled token, differentiable through `logprobs`.

    With d = logprobs - reference_logprobs: `k1` = d, `k2` = d²/2, `k3` = e^{-d} - 1 + d (Schulman, "Approximating KL Divergence").
    In expectation over tokens of the current policy, the gradient of `k2` equals the gradient of the divergence, and the gradient of `k1`
    is 0. `k1+` and `k3+` have the value of `k1` and `k3` and the gradient of `k2` (verl's `kl+` and `low_var_kl+`). `k3_unbiased` is
    ρ·k3, including the gradient of ρ = exp(logprobs - inference_logprobs) (DeepSeek-V3.2, section 3.1); its value and gradient are
    unbiased for any sampling policy.

    Args:
        kind: key of `KL_KINDS`.
        logprobs: log-probs of the current policy, `[...]`.
        reference_logprobs: log-probs of the reference, same shape.
        inference_logprobs: log-probs at sampling, same shape; for `k3_unbiased`.

    Raises:
        ValueError: the kind is unknown, shapes differ, or `inference_logprobs` is missing.
    """
    check_known("KL estimate", kind, KL_KINDS)
    difference = _difference("reference_logprobs", logprobs, reference_logprobs.detach())
    if kind == "k1":
        return difference
    if kind == "k2":
        return difference.square() / 2.0
    if kind in ("k1+", "k3+"):
        value = kl_estimate(kind[:2], logprobs.detach(), reference_logprobs)
        slope = difference.square() / 2.0
        return value + (slope - slope.detach())
    k3 = bounded_exp(-difference) - 1.0 + difference
    if kind == "k3":
        return k3
    if inference_logprobs is None:
        raise ValueError(
            "inference_logprobs must be given for KL estimate k3_unbiased, which weights by the sampling policy"
        )
    return bounded_exp(_difference("inference_logprobs", logprobs, inference_logprobs.detach())) * k3


def _difference(other_name: str, logprobs: Tensor, other: Tensor) -> Tensor:
    if logprobs.shape != other.shape:
        raise ValueError(f"{other_name} has shape {tuple(other.shape)}, logprobs has {tuple(logprobs.shape)}")
    dtype = torch.promote_types(logprobs.dtype, torch.float32)
    return logprobs.to(dtype) - other.to(dtype)
