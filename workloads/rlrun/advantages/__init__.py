"""Advantages of whole rollouts. The orchestrator makes them, so they need numpy alone: torch would cost its process half a gigabyte."""

from rlrun.advantages.estimate import advantages, token_advantages
from rlrun.advantages.estimators import ADVANTAGES, RewardGroups

__all__ = ["ADVANTAGES", "RewardGroups", "advantages", "token_advantages"]
