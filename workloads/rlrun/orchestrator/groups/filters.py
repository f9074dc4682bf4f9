"""Filters and reward shaping of a finished group. Pure functions of the recorded rollouts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rlrun.config.models.learning import AdvantageConfig, FilterConfig
from rlrun.config.models.roles import OrchestratorConfig
from rlrun.config.models.rollout import CurriculumConfig
from rlrun.orchestrator.tasks.curriculum import pool_of
from rlrun.orchestrator.types import FinishedGroup, Rollout, run_lengths

REPETITION_PROBABILITY = 0.99
"""Token probability above which consecutive tokens count as repetition (MiniMax-M1)."""
RARE_TOKEN_ID = 100_000
"""Token id above which a token counts as rare, because tokenizers give the rarest merges the highest ids."""
GIBBERISH_LOG_OFFSET = 2.0
"""Nats below the log-probability of a token under a uniform distribution."""


@dataclass(frozen=True)
class Rules:
    """Filter and advantage rules of one environment."""

    advantage: AdvantageConfig
    filters: FilterConfig
    max_tokens: int
    """Token limit of one reply. The overlong penalty of a rollout is the penalty of its longest reply."""
    vocabulary: int
    """Number of tokens of the tokenizer."""
    curriculum: CurriculumConfig | None = None
    """Thresholds for tasks that are too easy or too hard."""


def rules_of(config: OrchestratorConfig, *, vocabulary: int) -> dict[str, Rules]:
    """Return the rules of each environment by its label. An environment's own settings replace the run's."""
    run = config.algorithm
    return {
        environment.label: Rules(
            advantage=environment.algorithm.merged_over(run).batch_advantage,
            filters=environment.algorithm.filters or run.effective_filters,
            max_tokens=(environment.sampling or config.sampling).max_tokens,
            vocabulary=vocabulary,
            curriculum=environment.curriculum,
        )
        for environment in config.environments
    }


def overlong_penalty(tokens: int, *, max_tokens: int, buffer: float, factor: float) -> float:
    """Return min(-(tokens - (max_tokens - O))/O·factor, 0) with O = buffer·max_tokens (DAPO, eq. 13), which is 0 up to
    the start of the buffer.
    """
    size = buffer * max_tokens
    return min(-(tokens - (max_tokens - size)) / size * factor, 0.0)


def repeats_itself(rollout: Rollout, *, window: int) -> bool:
    """Return whether `window` consecutive sampled tokens each had a probability above 0.99."""
    bound = math.log(REPETITION_PROBABILITY)
    sure = [(sequence.logprobs > bound) & sequence.loss_mask for sequence in rollout.sequences]
    return any(max(run_lengths(mask), default=0) >= window for mask in sure)


def is_gibberish(rollout: Rollout, *, vocabulary: int) -> bool:
    """Return whether a token with an id above 100000 was sampled with a log-probability below -log(vocabulary) - 2."""
    bound = -math.log(vocabulary) - GIBBERISH_LOG_OFFSET
    return any(
        bool(((s.input_ids > RARE_TOKEN_ID) & (s.logprobs < bound) & s.loss_mask).any()) for s in rollout.sequences
    )


def shaped_reward(rollout: Rollout, rules: Rules) -> float:
    """Return the reward for the advantages: the environment's reward minus the overlong penalty."""
    if rules.filters.overlong_penalty == 0:
        return rollout.reward
    return rollout.reward + overlong_penalty(
        max(rollout.reply_lengths),
        max_tokens=rules.max_tokens,
        buffer=rules.filters.overlong_buffer,
        factor=rules.filters.overlong_penalty,
    )


def masked_by(rollout: Rollout, rules: Rules) -> str | None:
    """Return the field of the filter that masks the loss of a rollout's tokens, or None. The reward counts for the
    group in both cases.
    """
    filters = rules.filters
    if filters.overlong_mask and rollout.truncated:
        return "overlongMask"
    if filters.repetition_mask and repeats_itself(rollout, window=filters.repetition_window):
        return "repetitionMask"
    if filters.gibberish_mask and is_gibberish(rollout, vocabulary=rules.vocabulary):
        return "gibberishMask"
    return None


def is_trained_on(rollout: Rollout, rules: Rules) -> bool:
    """Return whether a rollout's tokens carry loss."""
    return masked_by(rollout, rules) is None


def reason_to_drop(group: FinishedGroup, rules: Rules) -> str | None:
    """Return the reason to replace a group by another one instead of training on it, or None."""
    if (reason := _outside_difficulty(group.mean_reward, rules.curriculum)) is not None:
        return reason
    if rules.filters.zero_variance and group.zero_variance:
        return "zero_variance"
    if not any(is_trained_on(rollout, rules) for rollout in group.rollouts):
        return "masked"
    return None


def _outside_difficulty(mean: float, curriculum: CurriculumConfig | None) -> str | None:
    """Online difficulty filter: `too_easy` or `too_hard` if the task's pool is not trained on."""
    pool = None if curriculum is None else pool_of(mean, curriculum)
    if curriculum is None or pool is None:
        return None
    config = curriculum.easy if pool == "easy" else curriculum.hard
    return None if config is None or config.train else f"too_{pool}"


def filter_metrics(groups: Sequence[FinishedGroup], rules: Mapping[str, Rules]) -> dict[str, float]:
    """Return the shares of a batch's rollouts that repeat themselves, are gibberish, or carry no loss."""
    found = [(rollout, rules[group.environment]) for group in groups for rollout in group.rollouts]
    return {
        "batch/repetition": _true_share(repeats_itself(r, window=own.filters.repetition_window) for r, own in found),
        "batch/gibberish": _true_share(is_gibberish(r, vocabulary=own.vocabulary) for r, own in found),
        "batch/masked": _true_share(not is_trained_on(r, own) for r, own in found),
    }


def _true_share(values: Iterable[bool]) -> float:
    return float(np.mean(list(values)))
