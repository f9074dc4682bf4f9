"""Advantages and policy losses as plain torch functions on packed tensors.

`advantages` turns the rewards of groups into advantages, `policy_loss` those into a differentiable scalar.
Names, options and presets are data in `rlrun.config.algorithm_names`.
"""

from rlrun.algorithms.advantages import ADVANTAGES, RewardGroups, advantages
from rlrun.algorithms.custom import Algorithm
from rlrun.algorithms.inputs import LossInputs
from rlrun.algorithms.kl import kl_estimate, mismatch_kl
from rlrun.algorithms.losses import TokenLoss
from rlrun.algorithms.metrics import mean_metrics, merge_metrics
from rlrun.algorithms.policy import LOSSES, LossOutput, denominator_count, policy_loss
from rlrun.config.algorithm_names import DEFAULT_ADVANTAGE, DEFAULT_LOSS, PRESETS, Preset

__all__ = [
    "ADVANTAGES",
    "DEFAULT_ADVANTAGE",
    "DEFAULT_LOSS",
    "LOSSES",
    "PRESETS",
    "Algorithm",
    "LossInputs",
    "LossOutput",
    "Preset",
    "RewardGroups",
    "TokenLoss",
    "advantages",
    "denominator_count",
    "kl_estimate",
    "mean_metrics",
    "merge_metrics",
    "mismatch_kl",
    "policy_loss",
]
