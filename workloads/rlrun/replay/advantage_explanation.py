"""Explanation of an advantage: the rewards of its group, and the value after each stage of its estimator.

Each number is a result of `rlrun.advantages`: a stage is the same estimator without its later options.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rlrun.advantages.batch_advantages import PER_TOKEN, batch_advantages
from rlrun.advantages.estimators import Floats, RewardGroups, level_means, level_stds
from rlrun.config.algorithm.names import Options, complete_options, is_import_path
from rlrun.config.models.learning import AdvantageConfig
from rlrun.config.models.roles import OrchestratorConfig
from rlrun.protocol.files.batch import Batch, Outcome, Sample

OFF: Mapping[str, object] = {
    "turn_discount": 1.0,
    "length_penalty": 0.0,
    "global_std": False,
    "gamma": 1.0,
    "adv_mean": "none",
    "adv_std": "none",
    "neg_clipped": False,
}
"""Neutral values of all estimators' options, in the order in which the options act."""
_BEFORE = ("turn_discount", "length_penalty")
"""Options that change the reward before the estimator."""


@dataclass(frozen=True)
class Stage:
    """One stage of an estimate."""

    text: str
    value: float
    """Value after the stage, for the rollout's first loss token."""


@dataclass(frozen=True)
class Advantage:
    """Explanation of an advantage."""

    name: str
    """Name of the estimator."""
    options: Mapping[str, object]
    """Options with other values than the defaults."""
    rewards: tuple[float, ...]
    """Rewards of the group in the order of the rollouts, as passed to the estimator."""
    stages: tuple[Stage, ...]
    computed: tuple[float, ...]
    """Computed values per loss token."""
    stored: tuple[float, ...]
    """Values per loss token in the batch."""
    note: str | None = None
    """Remark that the numbers do not show."""

    @property
    def equal(self) -> bool:
        """Whether the batch contains the computed values."""
        return self.computed == self.stored


def advantage_settings(config: OrchestratorConfig) -> dict[str, AdvantageConfig]:
    """Return the estimator of each environment by its label, as used by the orchestrator: its own or the run's."""
    return {one.label: one.algorithm.merged_over(config.algorithm).batch_advantage for one in config.environments}


def outcomes_of(batch: Batch) -> tuple[Outcome, ...]:
    """Return the inputs of the advantages. For a batch of an older release they are derived from its samples."""
    if batch.outcomes:
        return batch.outcomes
    own: dict[tuple[int, int], list[Sample]] = {}
    for sample in batch.samples:
        own.setdefault((sample.group, sample.rollout), []).append(sample)
    return tuple(
        Outcome(
            group,
            rollout,
            samples[0].environment,
            samples[0].reward,
            tokens=int(sum(sample.loss_mask.sum() for sample in samples)),
            turns=sum(_count_replies(sample) for sample in samples),
            masked=None if any(sample.loss_mask.any() for sample in samples) else "a filter",
        )
        for (group, rollout), samples in own.items()
    )


def _count_replies(sample: Sample) -> int:
    return int((np.diff(np.concatenate([[False], sample.loss_mask]).astype(np.int8)) == 1).sum())


def explain_advantage(batch: Batch, index: int, settings: Mapping[str, AdvantageConfig]) -> Advantage | None:
    """Explain a sample's advantage. None if no estimator exists (demonstrations, or an environment that is no longer
    configured).

    Args:
        batch: batch of the step.
        index: index of the sample.
        settings: result of `advantage_settings`.

    Raises:
        ValueError: the estimator rejects the rewards.
    """
    sample = batch.samples[index]
    own = settings.get(sample.environment)
    if own is None:
        return None
    # The estimator sees all rollouts of the batch with the same settings, and no others.
    outcomes = [outcome for outcome in outcomes_of(batch) if settings.get(outcome.environment) == own]
    at = next(i for i, o in enumerate(outcomes) if (o.group, o.rollout) == (sample.group, sample.rollout))
    place = _RolloutPosition(outcomes, at, _first_token(batch, index))
    computed = place.token_values(own)
    stored = sample.advantages[sample.loss_mask]
    count = len(stored)
    return Advantage(
        own.name,
        own.options,
        tuple(outcome.reward for outcome in outcomes if outcome.group == sample.group),
        tuple(place.value_stages(own)),
        tuple(float(value) for value in computed[place.token : place.token + count]),
        tuple(float(value) for value in stored),
        _advantage_note(batch, outcomes[at], own),
    )


def _first_token(batch: Batch, index: int) -> int:
    """Return the number of loss tokens of the same rollout in earlier samples."""
    sample = batch.samples[index]
    before = [one for one in batch.samples[:index] if (one.group, one.rollout) == (sample.group, sample.rollout)]
    return int(sum(one.loss_mask.sum() for one in before))


def _advantage_note(batch: Batch, outcome: Outcome, own: AdvantageConfig) -> str | None:
    if outcome.masked is not None:
        return f"{outcome.masked} masks the loss of all tokens of this rollout; its reward counts for its group"
    if own.name == PER_TOKEN:
        return "the critic computes the advantages of the tokens during training; the batch contains the reward instead"
    if not batch.outcomes:
        return "the batch was written by an older release, without overlong penalties and masks of filters"
    return None


@dataclass(frozen=True)
class _RolloutPosition:
    """One rollout among all rollouts of the batch with the same settings."""

    outcomes: Sequence[Outcome]
    at: int
    token: int
    """Index of the sample's first loss token within the rollout."""

    def token_values(self, changed: AdvantageConfig) -> list[float]:
        """Compute the values of the rollout's tokens with other settings."""
        return [float(value) for value in batch_advantages(self.outcomes, [changed] * len(self.outcomes))[self.at]]

    def first_value(self, changed: AdvantageConfig) -> float:
        """Compute the value of the sample's first loss token."""
        found = self.token_values(changed)
        return found[min(self.token, len(found) - 1)] if found else 0.0

    def value_stages(self, own: AdvantageConfig) -> list[Stage]:
        """Return the stages that change the value, from the reward to the advantage."""
        outcome = self.outcomes[self.at]
        found = [Stage(f"reward {_short_number(outcome.reward)}", outcome.reward)]
        if is_import_path(own.name) or own.name == PER_TOKEN:
            return [*found, Stage(_of_others(own), self.first_value(own))]
        options = complete_options("advantage", own.name, own.options)
        used = {name: options[name] for name in OFF if name in options and options[name] != OFF[name]}
        off = {name: value for name, value in OFF.items() if name in options}
        shaped = {name: used[name] for name in _BEFORE if name in used}
        if shaped:
            plain = AdvantageConfig(name="reward", options=shaped)
            words = ", ".join(f"{name} {value}" for name, value in shaped.items())
            found.append(Stage(f"{words} ({outcome.turns} turns, {outcome.tokens} tokens)", self.first_value(plain)))
        bare = AdvantageConfig(name=own.name, options={**own.options, **off, **shaped})
        found.append(Stage(self._describe_estimator(own.name, options, shaped), self.first_value(bare)))
        turned_on = dict(shaped)
        for names in (("global_std",), ("gamma",), ("adv_mean", "adv_std"), ("neg_clipped",)):
            now = {name: used[name] for name in names if name in used}
            if not now:
                continue
            turned_on |= now
            stage = AdvantageConfig(name=own.name, options={**own.options, **off, **turned_on})
            found.append(Stage("; ".join(_LATER[name](value) for name, value in now.items()), self.first_value(stage)))
        return found

    def _describe_estimator(self, name: str, options: Options, shaped: Options) -> str:
        plain = AdvantageConfig(name="reward", options=dict(shaped))
        found = batch_advantages(self.outcomes, [plain] * len(self.outcomes))
        rewards = [
            float(values[0]) if len(values) else outcome.reward
            for values, outcome in zip(found, self.outcomes, strict=True)
        ]
        places = {group: place for place, group in enumerate(dict.fromkeys(one.group for one in self.outcomes))}
        ids = np.array([places[outcome.group] for outcome in self.outcomes])
        lengths = np.array([outcome.tokens for outcome in self.outcomes], np.float64)
        facts = Facts(RewardGroups(np.array(rewards, np.float64), ids, len(places), lengths), self.at, options)
        return f"{name}: {ESTIMATORS[name](facts)}"


@dataclass(frozen=True)
class Facts:
    """Numbers of a rollout's group and batch, computed by the functions of the estimators."""

    groups: RewardGroups
    at: int
    options: Options

    @property
    def reward(self) -> float:
        """Shaped reward R."""
        return float(self.groups.rewards[self.at])

    @property
    def size(self) -> int:
        """Group size G."""
        return int(self.groups.sizes[self.at])

    @property
    def total(self) -> float:
        """Sum of the group's rewards, ΣR."""
        return float(self.groups.sum(self.groups.rewards)[self.at])

    @property
    def length(self) -> float:
        """Length L in loss tokens."""
        return 0.0 if self.groups.lengths is None else float(self.groups.lengths[self.at])

    def level_mean(self, level: str) -> float:
        """Return the mean reward over rollouts at a level."""
        sums = self._group_sums
        return float(
            level_means(level, sums(np.ones_like(self.groups.rewards)), sums(self.groups.rewards))[self._group]
        )

    def level_std(self, mean: str, level: str) -> float:
        """Return the divisor at a level, around the mean of another level."""
        sums, rewards = self._group_sums, self.groups.rewards
        counts = sums(np.ones_like(rewards))
        centred = rewards - level_means(mean, counts, sums(rewards))[self.groups.group_ids]
        return float(level_stds(level, counts, sums(np.square(centred)))[self._group])

    def weighted_sums(self) -> tuple[float, float]:
        """Return ΣR·L and ΣL of the group."""
        lengths = self.groups.lengths if self.groups.lengths is not None else np.zeros_like(self.groups.rewards)
        sums = self.groups.sum
        return float(sums(self.groups.rewards * lengths)[self.at]), float(sums(lengths)[self.at])

    @property
    def _group(self) -> int:
        return int(self.groups.group_ids[self.at])

    def _group_sums(self, values: Floats) -> Floats:
        found: Floats = np.bincount(self.groups.group_ids, weights=values, minlength=self.groups.num_groups).astype(
            np.float64
        )
        return found


def _explain_grpo(facts: Facts) -> str:
    mean, std = str(facts.options["mean"]), str(facts.options["std"])
    less = "" if mean == "none" else f" - {mean} mean {_short_number(facts.level_mean(mean))}"
    by = "" if std == "none" else f", divided by {std} std {_short_number(facts.level_std(mean, std))}"
    return f"{_short_number(facts.reward)}{less}{by}"


def _explain_centered(facts: Facts) -> str:
    return f"{_short_number(facts.reward)} - group mean {_short_number(facts.level_mean('group'))}"


def _explain_rloo(facts: Facts) -> str:
    if facts.size < 2:
        return f"{_short_number(facts.reward)}: the group has no other rollout"
    others = (facts.total - facts.reward) / (facts.size - 1)
    return f"{_short_number(facts.reward)} - mean of the {facts.size - 1} others {_short_number(others)}"


def _explain_opo(facts: Facts) -> str:
    weighted, length = facts.weighted_sums()
    if facts.options["leave_one_out"]:
        weighted, length = weighted - facts.reward * facts.length, length - facts.length
    words = "of the others" if facts.options["leave_one_out"] else "of the group"
    baseline = weighted / length if length > 0 else facts.level_mean("group")
    return f"{_short_number(facts.reward)} - mean {words} weighted by length {_short_number(baseline)}"


def _max_rl(facts: Facts) -> str:
    return f"({_short_number(facts.reward)} - group mean {_short_number(facts.level_mean('group'))}) / group mean, within ±{facts.size - 1}"


def _explain_qae(facts: Facts) -> str:
    baseline = float(facts.groups.quantile(facts.options["quantile"])[facts.at])
    return f"{_short_number(facts.reward)} - group quantile {facts.options['quantile']:g}, {_short_number(baseline)}"


def _explain_reward(facts: Facts) -> str:
    return f"{_short_number(facts.reward)}, without a baseline"


ESTIMATORS: Mapping[str, Callable[[Facts], str]] = {
    "grpo": _explain_grpo,
    "dr_grpo": _explain_centered,
    "rloo": _explain_rloo,
    "opo": _explain_opo,
    "max_rl": _max_rl,
    "qae": _explain_qae,
    "reward": _explain_reward,
    "reinforce_pp": _explain_reward,
    "reinforce_pp_baseline": _explain_centered,
}
"""Explanation of each built-in estimator with its numbers."""
_LATER: Mapping[str, Callable[[object], str]] = {
    "global_std": lambda _: "divided by the standard deviation of all rewards of the batch",
    "gamma": lambda value: f"discounted by {value} for each later loss token",
    "adv_mean": lambda value: f"minus the mean over the loss tokens of the {value}",
    "adv_std": lambda value: f"divided by the standard deviation over the loss tokens of the {value}",
    "neg_clipped": lambda _: "negative values become 0",
}


def _of_others(own: AdvantageConfig) -> str:
    if own.name == PER_TOKEN:
        return "gae: the critic computes the advantage from it"
    return f"{own.name}, a user-defined function"


def _short_number(value: float) -> str:
    return f"{value:.6g}"
