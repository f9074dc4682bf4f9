"""Advantages of all rollouts of a batch, whose environments may have estimators of their own. Pure, numpy alone.

The orchestrator makes a batch's advantages here, and a replay explains them with the same numbers.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from rlrun.advantages.estimate import token_advantages
from rlrun.config.algorithm.names import Options
from rlrun.config.models.learning import AdvantageConfig
from rlrun.protocol.files.batch import Outcome

Values = npt.NDArray[np.float32]
PER_TOKEN = "gae"
"""The estimator that the trainer's critic makes: the batch then carries the rewards in place of the advantages."""


def batch_advantages(outcomes: Sequence[Outcome], settings: Sequence[AdvantageConfig]) -> list[Values]:
    """Advantages of each rollout, one per token that the policy sampled. Rollouts with the same settings are one batch.

    Args:
        outcomes: of all rollouts, group by group.
        settings: of each rollout.

    Raises:
        ValueError: an estimator refuses the rewards or its options.
    """
    found: list[Values] = [np.empty(0, np.float32)] * len(outcomes)
    for advantage in unequal(settings):
        members = [index for index, own in enumerate(settings) if own == advantage]
        for index, values in zip(members, _estimated(advantage, [outcomes[i] for i in members]), strict=True):
            found[index] = values
    return found


def unequal(settings: Sequence[AdvantageConfig]) -> list[AdvantageConfig]:
    """Each of the settings once, in order; they are not hashable."""
    found: list[AdvantageConfig] = []
    for one in settings:
        if one not in found:
            found.append(one)
    return found


def _estimated(advantage: AdvantageConfig, members: Sequence[Outcome]) -> list[Values]:
    if advantage.name == PER_TOKEN:
        return [np.full(member.tokens, member.reward, np.float32) for member in members]
    places = {group: place for place, group in enumerate(dict.fromkeys(member.group for member in members))}
    options: Options = advantage.options
    return token_advantages(
        advantage.name,
        [member.reward for member in members],
        group_ids=[places[member.group] for member in members],
        lengths=[member.tokens for member in members],
        turns=[member.turns for member in members],
        trained=[member.masked is None for member in members],
        **options,
    )
