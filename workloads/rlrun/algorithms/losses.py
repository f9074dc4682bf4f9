"""The policy losses, per token. `policy_loss` masks, adds up and divides.

Notation: t trainer, i inference, o proximal log-prob, ρ = exp(t - i), r = exp(t - o), A advantage, sg stop-gradient.
Every function takes `LossInputs` and its own options by keyword, and returns a `TokenLoss`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rlrun.algorithms.inputs import LossInputs
from rlrun.algorithms.kl import bounded_exp

LARGEST_SEQUENCE_LOG_RATIO = 10.0


@dataclass(frozen=True)
class TokenLoss:
    """`loss` `[T]`, differentiable; `metrics` name -> `[T]`, added up over the loss tokens.

    A metric whose name ends in `_max` is not negative, and maximised instead.
    """

    loss: Tensor
    metrics: Mapping[str, Tensor] = field(default_factory=dict)


def aipo(inputs: LossInputs, *, delta: float) -> TokenLoss:
    """-min(ρ, δ)·A, with the gradient of -sg(min(ρ, δ))·A·t also where the ratio is truncated (LlamaRL, AIPO)."""
    log_ratio = inputs.log_ratio.detach()
    weight = log_ratio.clamp(max=math.log(delta)).exp()
    loss = -weight * inputs.advantages * (1.0 + inputs.logprobs - inputs.logprobs.detach())
    return TokenLoss(loss, _ratio_metrics(bounded_exp(log_ratio)) | {"clip_fraction": log_ratio > math.log(delta)})


def ppo(inputs: LossInputs, *, eps_low: float, eps_high: float, dual_clip: float) -> TokenLoss:
    """max(-A·r, -A·clip(r, 1-ε_lo, 1+ε_hi)) (PPO, eq. 7); where A < 0 at most -A·c (Ye et al. 2020)."""
    ratio = bounded_exp(inputs.log_proximal_ratio)
    clipped, is_clipped = _clipped(ratio, inputs.advantages, eps_low, eps_high)
    negative = inputs.advantages < 0
    loss = torch.where(negative, torch.minimum(clipped, -inputs.advantages * dual_clip), clipped)
    is_clipped = is_clipped | (negative & (ratio > dual_clip))
    return TokenLoss(loss, _ratio_metrics(ratio) | {"clip_fraction": is_clipped})


def gspo(inputs: LossInputs, *, eps_low: float, eps_high: float) -> TokenLoss:
    """PPO's clip on s = exp(mean over the sequence of t - o), as sg(s)·exp(t - sg t) per token (GSPO-token).

    The gradient of an unclipped token is -A·s. One sequence is clipped as a whole if its advantages have one sign.
    """
    log_ratio = inputs.log_proximal_ratio.detach()
    mean = inputs.sequence_sum(log_ratio) / inputs.sequence_tokens().clamp(min=1)
    ratio = bounded_exp(inputs.on_tokens(mean) + inputs.logprobs - inputs.logprobs.detach())
    loss, is_clipped = _clipped(ratio, inputs.advantages, eps_low, eps_high)
    return TokenLoss(loss, _ratio_metrics(ratio) | {"clip_fraction": is_clipped})


def cispo(inputs: LossInputs, *, eps_low: float, eps_high: float) -> TokenLoss:
    """-sg(clip(ρ, 1-ε_lo, 1+ε_hi))·A·t (MiniMax-M1, eq. 4 and 5)."""
    ratio = bounded_exp(inputs.log_ratio.detach())
    weight = ratio.clamp(1.0 - eps_low, 1.0 + eps_high)
    loss = -weight * inputs.advantages * inputs.logprobs
    return TokenLoss(loss, _ratio_metrics(ratio) | {"clip_fraction": weight != ratio})


def dppo(inputs: LossInputs, *, mask_low: float, mask_high: float, kl_tau: float) -> TokenLoss:
    """-A·ρ + kl_tau·(log ρ)²; a token that moved too far with its advantage keeps only the second term.

    With d = e^t - e^i, dropped where A > 0 and d > mask_high, or A <= 0 and d < -mask_low.
    """
    log_ratio = inputs.log_ratio
    ratio = bounded_exp(log_ratio)
    moved = inputs.logprobs.detach().exp() - inputs.inference_logprobs.exp()
    dropped = torch.where(inputs.advantages > 0, moved > mask_high, moved < -mask_low)
    loss = torch.where(dropped, 0, -inputs.advantages * ratio) + kl_tau * log_ratio.square()
    return TokenLoss(loss, _ratio_metrics(ratio) | {"dropped_fraction": dropped})


def masked_is(
    inputs: LossInputs,
    *,
    ratio: str,
    mask_low: float,
    mask_high: float,
    geo_mask_low: float,
    geo_mask_high: float,
    sequence_mask_high: float,
    sequence_clip: float,
    adv_tau: float,
    teacher_tau: float,
    kl_tau: float,
) -> TokenLoss:
    """-sg(ρ·(adv_tau·A + teacher_tau·(ref - t) - kl_tau·log ρ))·t, 0 for a dropped token (PRIME-RL v0.3).

    A token is dropped when ρ is outside [mask_low, mask_high], a sequence when its geometric-mean ρ is outside
    [geo_mask_low, geo_mask_high] or any ρ exceeds sequence_mask_high. With `ratio="sequence"` every token has the
    sequence's ratio min(exp(min(Σ log ρ, 10)), sequence_clip), and the loss is a mean over its loss tokens.
    """
    log_ratio = inputs.log_ratio.detach()
    token_ratio = bounded_exp(log_ratio)
    tokens = inputs.sequence_tokens().clamp(min=1)
    log_total = inputs.sequence_sum(log_ratio)
    geometric_mean = bounded_exp(log_total / tokens)
    extremes = inputs.sequence_sum((token_ratio > sequence_mask_high).to(token_ratio.dtype))
    sequence_dropped = (geometric_mean < geo_mask_low) | (geometric_mean > geo_mask_high) | (extremes > 0)
    dropped = (token_ratio < mask_low) | (token_ratio > mask_high) | inputs.on_tokens(sequence_dropped)

    pull = adv_tau * inputs.advantages - kl_tau * log_ratio
    if teacher_tau > 0:
        if inputs.reference_logprobs is None:
            raise ValueError("reference_logprobs must be given where teacher_tau > 0: it needs a reference model")
        pull = pull + teacher_tau * (inputs.reference_logprobs - inputs.logprobs.detach())
    weight = token_ratio
    if ratio == "sequence":
        weight = inputs.on_tokens(log_total.clamp(max=LARGEST_SEQUENCE_LOG_RATIO).exp().clamp(max=sequence_clip))
    loss = -torch.where(dropped, 0, weight * pull) * inputs.logprobs
    if ratio == "sequence":
        loss = loss / inputs.on_tokens(tokens)
    return TokenLoss(loss, _ratio_metrics(weight) | {"dropped_fraction": dropped})


FUNCTIONS: Mapping[str, Callable[..., TokenLoss]] = {
    "aipo": aipo,
    "ppo": ppo,
    "dppo": dppo,
    "masked_is": masked_is,
    "gspo": gspo,
    "cispo": cispo,
}


def _clipped(ratio: Tensor, advantages: Tensor, eps_low: float, eps_high: float) -> tuple[Tensor, Tensor]:
    """PPO's pessimistic loss, and where its gradient is cut."""
    loss = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1.0 - eps_low, 1.0 + eps_high))
    cut = ((advantages > 0) & (ratio > 1.0 + eps_high)) | ((advantages < 0) & (ratio < 1.0 - eps_low))
    return loss, cut


def _ratio_metrics(ratio: Tensor) -> dict[str, Tensor]:
    return {"ratio": ratio, "ratio_max": ratio}
