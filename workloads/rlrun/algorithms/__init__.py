"""Policy and value losses as plain torch functions on packed tensors.

`advantages` computes advantages from the rewards of groups, on tensors (`rlrun.advantages` contains the formulas, in numpy). `gae`
computes advantages per token from a critic's values, and `policy_loss` a differentiable scalar from advantages. Names, options and
presets are data in `rlrun.config.algorithm.names`.
"""

from rlrun.algorithms.aggregation import (
    ValueLoss,
    aggregation_count,
    aggregation_weights,
    explained_variance,
    value_loss,
)
from rlrun.algorithms.correction import Corrected, correct_mismatch, proximal_logprobs
from rlrun.algorithms.kl import KlReward, Regularizers, kl_estimate, mismatch_kl
from rlrun.algorithms.loss_inputs import LossBatch, LossInputs
from rlrun.algorithms.losses import TokenLoss
from rlrun.algorithms.objective import LOSSES, LossOutput, Objective, denominator_count, policy_loss
from rlrun.algorithms.objective_mixture import Mixture, add_metric_sums, objective_means
from rlrun.algorithms.returns import Estimate, Moments, advantages, gae, returns_to_go, whiten
from rlrun.config.algorithm.names import AGGREGATIONS, DEFAULT_LOSS, PRESETS, Preset

__all__ = [
    "AGGREGATIONS",
    "DEFAULT_LOSS",
    "LOSSES",
    "PRESETS",
    "Corrected",
    "Estimate",
    "KlReward",
    "LossBatch",
    "LossInputs",
    "LossOutput",
    "Mixture",
    "Moments",
    "Objective",
    "Preset",
    "Regularizers",
    "TokenLoss",
    "ValueLoss",
    "add_metric_sums",
    "advantages",
    "aggregation_count",
    "aggregation_weights",
    "correct_mismatch",
    "denominator_count",
    "explained_variance",
    "gae",
    "kl_estimate",
    "mismatch_kl",
    "objective_means",
    "policy_loss",
    "proximal_logprobs",
    "returns_to_go",
    "value_loss",
    "whiten",
]
