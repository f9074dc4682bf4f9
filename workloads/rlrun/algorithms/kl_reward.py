"""KL to a reference in the reward: a reward of each token, whose return joins the token's advantage."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlrun.algorithms.kl import kl_estimate
from rlrun.algorithms.returns import returns_to_go
from rlrun.config.algorithm.names import KL_REWARD_KINDS, check_known


@dataclass(frozen=True)
class KlReward:
    """Reward -weight·k of each sampled token, k an estimate of KL(policy || reference) at the start of the step.

    Its policy gradient is that of the divergence of whole answers (Ziegler et al. 2019, eq. 2), for `k1` without bias. With
    advantages of one reward per answer the return of the KL rewards from a token on is added to the token's advantage; with a critic they
    are rewards of GAE. Raises ValueError for a value out of range or an unknown estimate.
    """

    weight: float
    """At least 0."""
    kind: str = "k1"
    """One of `KL_REWARD_KINDS`."""
    gamma: float = 1.0
    """Discount per loss token, in [0, 1]."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.weight) and self.weight >= 0):
            raise ValueError(f"weight must be a finite number of at least 0, got {self.weight}")
        check_known("kind", self.kind, KL_REWARD_KINDS)

    def rewards(self, logprobs: Tensor, reference_logprobs: Tensor, mask: Tensor) -> Tensor:
        """Rewards of the tokens, without a gradient, 0 outside the mask.

        Args:
            logprobs: `[T]`, of the policy at the start of the step.
            reference_logprobs: `[T]`.
            mask: `[T]` bool, the tokens that the policy sampled.

        Raises:
            ValueError: tensors of different shape.
        """
        estimate = kl_estimate(self.kind, logprobs.detach(), reference_logprobs)
        return torch.where(mask.bool(), -self.weight * estimate, 0)

    def returns(
        self, logprobs: Tensor, reference_logprobs: Tensor, *, mask: Tensor, sequence_lengths: Sequence[int]
    ) -> Tensor:
        """Discounted sum of the rewards from each token to the end of its sequence, `[T]`, 0 outside the mask.

        Arguments as of `rewards`; `sequence_lengths` are S positive lengths that add up to T.

        Raises:
            ValueError: names the argument that is misaligned, not finite or out of range.
        """
        rewards = self.rewards(logprobs, reference_logprobs, mask)
        return returns_to_go(rewards, mask=mask, sequence_lengths=sequence_lengths, gamma=self.gamma)
