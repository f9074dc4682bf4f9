"""KL penalty in the reward: a reward per token, whose return is added to the token's advantage."""

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
