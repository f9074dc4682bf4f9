"""KL divergence between two policies: estimates per sampled token, a penalty in the reward, and terms of the loss.

A KL penalty is a reward per token, whose return is added to the token's advantage. The terms that any policy loss can add per token are the
KL divergence to a reference and an entropy bonus.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlrun.algorithms.loss_inputs import LossInputs
from rlrun.algorithms.returns import returns_to_go
from rlrun.config.algorithm.names import KL_KINDS, KL_REWARD_KINDS, check_known

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
    log_ratio = _logprob_difference("inference_logprobs", logprobs, inference_logprobs)
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
    difference = _logprob_difference("reference_logprobs", logprobs, reference_logprobs.detach())
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
    return bounded_exp(_logprob_difference("inference_logprobs", logprobs, inference_logprobs.detach())) * k3


def _logprob_difference(other_name: str, logprobs: Tensor, other: Tensor) -> Tensor:
    if logprobs.shape != other.shape:
        raise ValueError(f"{other_name} has shape {tuple(other.shape)}, logprobs has {tuple(logprobs.shape)}")
    dtype = torch.promote_types(logprobs.dtype, torch.float32)
    return logprobs.to(dtype) - other.to(dtype)


@dataclass(frozen=True)
class KlReward:
    """Reward -weight·k of each sampled token; k estimates KL(policy || reference) at the start of the step.

    Its policy gradient is the gradient of the divergence of complete answers (Ziegler et al. 2019, eq. 2), without bias for `k1`. If the
    advantages come from one reward per answer, the return of the KL rewards is added to the advantage of each token. With a critic, they
    are rewards of GAE.

    Raises:
        ValueError: a value is out of range, or the estimate is unknown.
    """

    weight: float
    """Factor of the estimate, at least 0."""
    kind: str = "k1"
    """Estimate, one of `KL_REWARD_KINDS`."""
    gamma: float = 1.0
    """Discount per loss token, in [0, 1]."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.weight) and self.weight >= 0):
            raise ValueError(f"weight must be a finite number of at least 0, got {self.weight}")
        check_known("kind", self.kind, KL_REWARD_KINDS)

    def rewards(self, logprobs: Tensor, reference_logprobs: Tensor, mask: Tensor) -> Tensor:
        """Return the rewards of the tokens, `[T]`, without a gradient and 0 outside the mask.

        Args:
            logprobs: log-probs of the policy at the start of the step, `[T]`.
            reference_logprobs: log-probs of the reference, `[T]`.
            mask: sampled tokens, `[T]` bool.

        Raises:
            ValueError: shapes differ.
        """
        estimate = kl_estimate(self.kind, logprobs.detach(), reference_logprobs)
        return torch.where(mask.bool(), -self.weight * estimate, 0)

    def returns(
        self, logprobs: Tensor, reference_logprobs: Tensor, *, mask: Tensor, sequence_lengths: Sequence[int]
    ) -> Tensor:
        """Return the discounted sum of the rewards from each token to the end of its sequence, `[T]`, 0 outside the mask.

        The arguments are those of `rewards`, and `sequence_lengths`: S positive lengths with sum T.

        Raises:
            ValueError: an argument is misaligned, not finite or out of range; the message contains its name.
        """
        rewards = self.rewards(logprobs, reference_logprobs, mask)
        return returns_to_go(rewards, mask=mask, sequence_lengths=sequence_lengths, gamma=self.gamma)


@dataclass(frozen=True)
class Regularizers:
    """Weights of the terms; 0 disables a term.

    Raises:
        ValueError: a weight is negative or not finite, or the estimate is unknown.
    """

    entropy: float = 0.0
    """Weight of the entropy of the token's distribution, in nats, which is subtracted from the loss."""
    kl: float = 0.0
    """Weight of the estimate of KL(policy || reference), which is added to the loss."""
    kl_kind: str = "k3"
    """Key of `KL_KINDS`, see `kl_estimate`; `k1` is not allowed if `kl` is greater than 0."""

    def __post_init__(self) -> None:
        for name in ("entropy", "kl"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"regularizers: {name} must be a finite number of at least 0, got {value}")
        check_known("regularizers: kl_kind", self.kl_kind, KL_KINDS)
        if self.kl > 0 and self.kl_kind == "k1":
            raise ValueError(
                "regularizers: kl_kind k1 has an expected gradient of 0 as a loss; use k2, or subtract it from the reward (KlReward)"
            )

    def add(
        self, loss: Tensor, inputs: LossInputs, entropy: Tensor | None, *, checked: bool = False
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Add the terms to `loss` `[T]`, and return the sum and the metrics of the terms.

        Raises:
            ValueError: differentiable `entropy` `[T]` or reference log-probs are missing for an enabled term.
        """
        metrics: dict[str, Tensor] = {}
        if self.entropy > 0:
            bonus = _checked_entropy(inputs, entropy, checked)
            loss = loss - self.entropy * bonus
            metrics["entropy_bonus"] = self.entropy * bonus.detach()
        if self.kl > 0:
            if inputs.reference_logprobs is None:
                raise ValueError(
                    "reference_logprobs must be given if regularizers.kl > 0, which needs a reference model"
                )
            penalty = kl_estimate(
                self.kl_kind,
                inputs.logprobs,
                inputs.reference_logprobs,
                inference_logprobs=inputs.inference_logprobs,
            )
            loss = loss + self.kl * penalty
            metrics["kl_penalty"] = self.kl * penalty.detach()
        return loss, metrics


def _checked_entropy(inputs: LossInputs, entropy: Tensor | None, checked: bool) -> Tensor:
    if entropy is None:
        raise ValueError("entropy must be given with its gradient if regularizers.entropy > 0")
    if entropy.shape != inputs.logprobs.shape:
        raise ValueError(f"entropy must have shape {list(inputs.logprobs.shape)}, got {list(entropy.shape)}")
    if inputs.logprobs.requires_grad and not entropy.requires_grad:
        raise ValueError("entropy has no gradient: a bonus on it would do nothing")
    kept = torch.where(inputs.mask, entropy, 0).to(inputs.logprobs.dtype)
    if not checked and not bool(torch.isfinite(kept.detach().sum())):
        raise ValueError("entropy is not finite inside the loss mask")
    return kept
