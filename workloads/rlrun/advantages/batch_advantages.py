"""Advantages of all rollouts of a batch, whose environments may have different estimators. Uses only numpy.

The orchestrator computes the advantages of a batch here, and a replay recomputes the same numbers.
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
"""Estimator of the trainer's critic; with it, the batch contains rewards instead of advantages."""


def batch_advantages(outcomes: Sequence[Outcome], settings: Sequence[AdvantageConfig]) -> list[Values]:
    """Return the advantages of each rollout, one per sampled token. Rollouts with equal settings are normalized together.

    Args:
        outcomes: outcomes of all rollouts, ordered by group.
        settings: settings of each rollout.

    Raises:
        ValueError: the rewards or the options of an estimator are invalid.
    """
    found: list[Values] = [np.empty(0, np.float32)] * len(outcomes)
    for advantage in distinct_settings(settings):
        members = [index for index, own in enumerate(settings) if own == advantage]
        for index, values in zip(members, _estimate_members(advantage, [outcomes[i] for i in members]), strict=True):
            found[index] = values
    return found


def distinct_settings(settings: Sequence[AdvantageConfig]) -> list[AdvantageConfig]:
    """Return the distinct settings in order; they are not hashable."""
    found: list[AdvantageConfig] = []
    for one in settings:
        if one not in found:
            found.append(one)
    return found


def _estimate_members(advantage: AdvantageConfig, members: Sequence[Outcome]) -> list[Values]:
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
