"""Policy losses per token. `Objective` applies the mask, sums and divides.

Notation: t trainer, i inference, o proximal log-prob, ρ = exp(t - i), r = exp(t - o), A advantage, sg stop-gradient.

Every function takes `LossInputs` and its own options by keyword, and returns a `TokenLoss`. An entry of
`rlrun.config.algorithm.tables.LOSS_ENTRIES` declares its name, and its options with defaults and bounds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypedDict, Unpack

import torch
from torch import Tensor

from rlrun.algorithms.kl import bounded_exp
from rlrun.algorithms.loss_inputs import LossInputs

LARGEST_SEQUENCE_LOG_RATIO = 10.0


@dataclass(frozen=True)
class TokenLoss:
    """Differentiable loss per token, `[T]`, and metrics by name, each `[T]`.

    Metrics are summed over the loss tokens; a metric with a name in `_max` is not negative, and its maximum is taken.
    """

    loss: Tensor
    metrics: Mapping[str, Tensor] = field(default_factory=dict)


def aipo(inputs: LossInputs, *, delta: float) -> TokenLoss:
    """-min(ρ, δ)·A, with the gradient of -sg(min(ρ, δ))·A·t also for truncated ratios (LlamaRL, AIPO)."""
    log_ratio = inputs.log_ratio.detach()
    weight = log_ratio.clamp(max=math.log(delta)).exp()
    loss = -weight * inputs.advantages * (1.0 + inputs.logprobs - inputs.logprobs.detach())
    return TokenLoss(loss, _ratio_metrics(bounded_exp(log_ratio)) | {"clip_fraction": log_ratio > math.log(delta)})


def ppo(inputs: LossInputs, *, eps_low: float, eps_high: float, dual_clip: float | None) -> TokenLoss:
    """max(-A·r, -A·clip(r, 1-ε_lo, 1+ε_hi)) (PPO, eq. 7); for A < 0 at most -A·c with c = `dual_clip`, unless it is None (Ye et al.
    2020).
    """
    ratio = bounded_exp(inputs.log_proximal_ratio)
    clipped, is_clipped = _clipped_loss(ratio, inputs.advantages, eps_low, eps_high)
    if dual_clip is not None:
        negative = inputs.advantages < 0
        clipped = torch.where(negative, torch.minimum(clipped, -inputs.advantages * dual_clip), clipped)
        is_clipped = is_clipped | (negative & (ratio > dual_clip))
    return TokenLoss(clipped, _ratio_metrics(ratio) | {"clip_fraction": is_clipped})


def decoupled_ppo(
    inputs: LossInputs, *, eps_low: float, eps_high: float, dual_clip: float | None, cap: float | None, cap_mode: str
) -> TokenLoss:
    """PPO on exp(t - o) with weight w = sg exp(o - i), which is clamped or set to 0 above `cap` (Hilton et al. 2022; AReaL)."""
    if inputs.proximal_logprobs is None:
        raise ValueError("proximal_logprobs must be given for loss decoupled_ppo; without them use ppo")
    result = ppo(inputs, eps_low=eps_low, eps_high=eps_high, dual_clip=dual_clip)
    log_weight = inputs.proximal_logprobs - inputs.inference_logprobs
    log_cap = math.inf if cap is None else math.log(cap)
    above = log_weight > log_cap
    weight = bounded_exp(log_weight.clamp(max=log_cap))
    if cap_mode == "mask":
        weight = torch.where(above, 0, weight)
    metrics = {"weight": weight, "cap_fraction": above}
    return TokenLoss(weight * result.loss, {**result.metrics, **metrics})


def gspo(inputs: LossInputs, *, eps_low: float, eps_high: float) -> TokenLoss:
    """PPO's clip on s = exp(mean over the sequence of t - o), as sg(s)·exp(t - sg t) per token (GSPO-token).

    The gradient of an unclipped token is -A·s. If all advantages of a sequence have the same sign, all its tokens are clipped together.
    """
    log_ratio = inputs.log_proximal_ratio.detach()
    mean = inputs.sequence_sum(log_ratio) / inputs.sequence_tokens().clamp(min=1)
    ratio = bounded_exp(inputs.on_tokens(mean) + inputs.logprobs - inputs.logprobs.detach())
    loss, is_clipped = _clipped_loss(ratio, inputs.advantages, eps_low, eps_high)
    return TokenLoss(loss, _ratio_metrics(ratio) | {"clip_fraction": is_clipped})


def cispo(inputs: LossInputs, *, eps_low: float, eps_high: float) -> TokenLoss:
    """-sg(clip(r, 1-ε_lo, 1+ε_hi))·A·t (MiniMax-M1, eq. 4 and 5), with r = ρ if there are no proximal log-probs."""
    ratio = bounded_exp(inputs.log_proximal_ratio.detach())
    weight = ratio.clamp(1.0 - eps_low, 1.0 + eps_high)
    loss = -weight * inputs.advantages * inputs.logprobs
    return TokenLoss(loss, _ratio_metrics(ratio) | {"clip_fraction": weight != ratio})


def sapo(inputs: LossInputs, *, tau_positive: float, tau_negative: float) -> TokenLoss:
    """-(4/τ)·σ(τ(r - 1))·A, τ by the sign of A (SAPO, Gao et al. 2025, eq. 5 and 6).

    The slope is -A at r = 1 and decreases with the distance from 1. Without proximal log-probs, r = ρ.
    """
    ratio = bounded_exp(inputs.log_proximal_ratio)
    tau = torch.full_like(ratio, tau_negative).masked_fill(inputs.advantages > 0, tau_positive).detach()
    gate = 4.0 / tau * torch.sigmoid(tau * (ratio - 1.0))
    return TokenLoss(-gate * inputs.advantages, {**_ratio_metrics(ratio), "gate": gate})


def dppo(inputs: LossInputs, *, mask_low: float, mask_high: float, kl_tau: float) -> TokenLoss:
    """-A·ρ + kl_tau·(log ρ)²; tokens outside the trust region keep only the second term.

    With d = e^t - e^i, a token is outside if A > 0 and d > mask_high, or if A <= 0 and d < -mask_low.
    """
    moved = _probability_change(inputs)
    dropped = torch.where(inputs.advantages > 0, moved > mask_high, moved < -mask_low)
    return _trust_region(inputs, -inputs.advantages, dropped, kl_tau)


def ipo(inputs: LossInputs, *, thr: float, kl_tau: float) -> TokenLoss:
    """-A·ρ + kl_tau·(log ρ)²; a token with abs(e^t - e^i) > thr keeps only the second term, for both signs of A."""
    return _trust_region(inputs, -inputs.advantages, _probability_change(inputs).abs() > thr, kl_tau)


def ref_kl(inputs: LossInputs, *, mask_low: float, kl_tau: float) -> TokenLoss:
    """-sg(ref - t)·ρ + kl_tau·(log ρ)²; a token with e^t - e^i < -mask_low keeps only the second term.

    The gradient equals the gradient of the reverse KL(student || teacher) on sampled tokens, with ref - t as advantage (on-policy
    distillation).
    """
    if inputs.reference_logprobs is None:
        raise ValueError("reference_logprobs must be given for a distillation loss, which needs a teacher")
    pull = inputs.reference_logprobs - inputs.logprobs.detach()
    return _trust_region(inputs, -pull, _probability_change(inputs) < -mask_low, kl_tau)


def sft(inputs: LossInputs) -> TokenLoss:
    """-w·t with the advantage as weight w: 1 for demonstrations, the reward for the policy's own rollouts."""
    return TokenLoss(-inputs.advantages * inputs.logprobs, {"nll": -inputs.logprobs})


class MaskedISOptions(TypedDict):
    """Options of `masked_is`; `rlrun.config.algorithm.tables` has their meanings, defaults and bounds."""

    ratio: str
    mask_low: float
    mask_high: float
    geo_mask_low: float
    geo_mask_high: float
    sequence_mask_high: float
    sequence_clip: float
    adv_tau: float
    teacher_tau: float
    kl_tau: float


def masked_is(inputs: LossInputs, **options: Unpack[MaskedISOptions]) -> TokenLoss:
    """-sg(ρ·(adv_tau·A + teacher_tau·(ref - t) - kl_tau·log ρ))·t, 0 for a dropped token (PRIME-RL v0.3).

    A token is dropped if ρ is outside [mask_low, mask_high]. A sequence is dropped if the geometric mean of its ρ is outside
    [geo_mask_low, geo_mask_high] or any ρ exceeds sequence_mask_high. With `ratio="sequence"` every token has the ratio min(exp(min(Σ log
    ρ, 10)), sequence_clip) of its sequence, and the default aggregation is `seq_mean_token_mean`.
    """
    log_ratio = inputs.log_ratio.detach()
    token_ratio = bounded_exp(log_ratio)
    tokens = inputs.sequence_tokens().clamp(min=1)
    log_total = inputs.sequence_sum(log_ratio)
    geometric_mean = bounded_exp(log_total / tokens)
    extremes = inputs.sequence_sum((token_ratio > options["sequence_mask_high"]).to(token_ratio.dtype))
    sequence_dropped = (
        (geometric_mean < options["geo_mask_low"]) | (geometric_mean > options["geo_mask_high"]) | (extremes > 0)
    )
    dropped = (
        (token_ratio < options["mask_low"]) | (token_ratio > options["mask_high"]) | inputs.on_tokens(sequence_dropped)
    )

    pull = options["adv_tau"] * inputs.advantages - options["kl_tau"] * log_ratio
    teacher_tau = options["teacher_tau"]
    if teacher_tau > 0:
        if inputs.reference_logprobs is None:
            raise ValueError("reference_logprobs must be given if teacher_tau > 0, which needs a reference model")
        pull = pull + teacher_tau * (inputs.reference_logprobs - inputs.logprobs.detach())
    weight = token_ratio
    if options["ratio"] == "sequence":
        total_ratio = log_total.clamp(max=LARGEST_SEQUENCE_LOG_RATIO).exp()
        weight = inputs.on_tokens(total_ratio.clamp(max=options["sequence_clip"]))
    loss = -torch.where(dropped, 0, weight * pull) * inputs.logprobs
    return TokenLoss(loss, _ratio_metrics(weight) | {"dropped_fraction": dropped})


def _probability_change(inputs: LossInputs) -> Tensor:
    """Return d = e^t - e^i, the change of the token's probability since sampling; detached."""
    return inputs.logprobs.detach().exp() - inputs.inference_logprobs.exp()


def _trust_region(inputs: LossInputs, coefficient: Tensor, dropped: Tensor, kl_tau: float) -> TokenLoss:
    """Return coefficient·ρ, or 0 for `dropped` tokens, plus kl_tau·(log ρ)²."""
    log_ratio = inputs.log_ratio
    ratio = bounded_exp(log_ratio)
    loss = torch.where(dropped, 0, coefficient * ratio) + kl_tau * log_ratio.square()
    return TokenLoss(loss, _ratio_metrics(ratio) | {"dropped_fraction": dropped})


def _clipped_loss(ratio: Tensor, advantages: Tensor, eps_low: float, eps_high: float) -> tuple[Tensor, Tensor]:
    """Return PPO's pessimistic loss, and a boolean mask of the clipped tokens."""
    loss = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1.0 - eps_low, 1.0 + eps_high))
    cut = ((advantages > 0) & (ratio > 1.0 + eps_high)) | ((advantages < 0) & (ratio < 1.0 - eps_low))
    return loss, cut


def _ratio_metrics(ratio: Tensor) -> dict[str, Tensor]:
    return {"ratio": ratio, "ratio_max": ratio}
