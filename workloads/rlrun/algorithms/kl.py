"""Per-token divergence estimates between two policies on sampled tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from rlrun.config.algorithm.names import KL_KINDS, check_known

LARGEST_EXPONENT = 80.0
"""e^80 is far below the largest fp32 number: sums and products of bounded ratios stay finite."""


def bounded_exp(exponent: Tensor) -> Tensor:
    """e^x whose value and slope both stop growing at x = 80, so that neither overflows to inf or to inf·0 = nan.

    A plain clamp would let the slope fall to 0 there, which turns the sign of a sum of terms around.
    """
    value = exponent.detach().clamp(max=LARGEST_EXPONENT).exp()
    return value * (1.0 + (exponent - exponent.detach()))


def mismatch_kl(logprobs: Tensor, inference_logprobs: Tensor) -> Tensor:
    """ρ - log ρ - 1 per token, ρ = exp(logprobs - inference_logprobs); >= 0, and 0 where both agree.

    Both `[...]` of one shape, natural logarithms. It estimates KL(inference || trainer) on tokens that the inference
    policy sampled (Schulman, "Approximating KL Divergence", k3).
    """
    log_ratio = _difference("inference_logprobs", logprobs, inference_logprobs)
    return bounded_exp(log_ratio) - log_ratio - 1.0


def kl_estimate(
    kind: str, logprobs: Tensor, reference_logprobs: Tensor, *, inference_logprobs: Tensor | None = None
) -> Tensor:
    """KL(current || reference) per sampled token, differentiable through `logprobs`.

    With d = logprobs - reference_logprobs: `k1` = d, `k2` = d²/2, `k3` = e^{-d} - 1 + d (Schulman, "Approximating KL Divergence").
    Averaged over tokens that the current policy sampled, the gradient of `k2` is that of the divergence, of `k1` it is 0. `k1+` and `k3+`
    have the value of `k1` and `k3` and the gradient of `k2` (verl's `kl+` and `low_var_kl+`). `k3_unbiased` is ρ·k3 with the gradient of
    ρ = exp(logprobs - inference_logprobs) too (DeepSeek-V3.2, section 3.1): unbiased in value and gradient, whatever policy sampled.

    Args:
        kind: a key of `KL_KINDS`.
        logprobs: `[...]`, of the current policy.
        reference_logprobs: same shape.
        inference_logprobs: same shape, as sampled; for `k3_unbiased`.

    Raises:
        ValueError: an unknown kind, tensors of different shape, or missing `inference_logprobs`.
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
            "inference_logprobs must be given for KL estimate k3_unbiased, which weighs by the sampling policy"
        )
    return bounded_exp(_difference("inference_logprobs", logprobs, inference_logprobs.detach())) * k3


def _difference(other_name: str, logprobs: Tensor, other: Tensor) -> Tensor:
    if logprobs.shape != other.shape:
        raise ValueError(f"{other_name} has shape {tuple(other.shape)}, logprobs has {tuple(logprobs.shape)}")
    dtype = torch.promote_types(logprobs.dtype, torch.float32)
    return logprobs.to(dtype) - other.to(dtype)
