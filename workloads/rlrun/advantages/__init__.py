"""Advantages of rollouts, computed by the orchestrator. They use only numpy, because torch would take half a gigabyte of its memory."""

from rlrun.advantages.estimate import advantages, token_advantages
from rlrun.advantages.estimators import ADVANTAGES, RewardGroups

__all__ = ["ADVANTAGES", "RewardGroups", "advantages", "token_advantages"]
