"""Per-token divergence estimates between two policies on sampled tokens."""

from __future__ import annotations

import torch
from torch import Tensor

LARGEST_EXPONENT = 80.0
"""e^80 is far below the largest fp32 number: sums and products of bounded ratios stay finite."""

KL_KINDS = ("k1", "k2", "k3")


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


def kl_estimate(kind: str, logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """KL(current || reference) per sampled token, differentiable through `logprobs`.

    With d = logprobs - reference_logprobs: `k1` = d, `k2` = d²/2, `k3` = e^{-d} - 1 + d (Schulman, "Approximating KL
    Divergence"). Raises ValueError for another kind and for tensors of different shape.
    """
    if kind not in KL_KINDS:
        raise ValueError(f"kind: unknown KL estimate {kind!r}; known: {', '.join(KL_KINDS)}")
    difference = _difference("reference_logprobs", logprobs, reference_logprobs.detach())
    if kind == "k1":
        return difference
    if kind == "k2":
        return difference.square() / 2.0
    return bounded_exp(-difference) - 1.0 + difference


def _difference(other_name: str, logprobs: Tensor, other: Tensor) -> Tensor:
    if logprobs.shape != other.shape:
        raise ValueError(f"{other_name} has shape {tuple(other.shape)}, logprobs has {tuple(logprobs.shape)}")
    dtype = torch.promote_types(logprobs.dtype, torch.float32)
    return logprobs.to(dtype) - other.to(dtype)
