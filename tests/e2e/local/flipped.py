"""A user's own advantage by import path: GRPO's with the wrong sign."""

from __future__ import annotations

from torch import Tensor

from rlrun.algorithms.advantages import RewardGroups


def advantages(groups: RewardGroups) -> Tensor:
    """The negated group-mean advantage, `[N]`."""
    return -groups.centred
