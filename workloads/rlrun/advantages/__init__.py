"""Advantages of whole rollouts. The orchestrator makes them, so they need numpy alone: torch would cost its process half a gigabyte."""

from rlrun.advantages.estimators import ADVANTAGES, RewardGroups, advantages

__all__ = ["ADVANTAGES", "RewardGroups", "advantages"]
