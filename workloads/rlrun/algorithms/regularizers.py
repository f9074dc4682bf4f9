"""Terms added to any policy loss per token: an entropy bonus, and the KL divergence to a reference."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from rlrun.algorithms.inputs import LossInputs
from rlrun.algorithms.kl import kl_estimate
from rlrun.config.algorithm.names import KL_KINDS, check_known


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
            bonus = _entropy(inputs, entropy, checked)
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


def _entropy(inputs: LossInputs, entropy: Tensor | None, checked: bool) -> Tensor:
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
