"""Explanation of advantages for each estimator, with the numbers of the batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rlrun.advantages import ADVANTAGES
from rlrun.config.algorithm.names import complete_options
from rlrun.config.models.learning import AdvantageConfig, FilterConfig
from rlrun.orchestrator.batches.assemble import assemble_batch
from rlrun.orchestrator.groups.filters import Rules
from rlrun.orchestrator.types import FinishedGroup, Recorded, Rollout
from rlrun.protocol.files.batch import Batch
from rlrun.replay.advantage_explanation import ESTIMATORS, OFF, explain_advantage, outcomes_of
from rlrun.replay.sample_explanation import report_sample, report_text

REWARDS = ((1.0, 0.0, 0.0, 0.25), (0.5, 2.0), (0.125, 0.375, 0.75))
CHANGES: dict[str, Any] = {
    "turn_discount": 0.5,
    "length_penalty": 0.01,
    "global_std": True,
    "gamma": 0.9,
    "adv_mean": "group",
    "adv_std": "batch",
    "neg_clipped": True,
    "leave_one_out": True,
    "mean": "batch",
    "std": "group",
    "quantile": 0.25,
}


def recorded(length: int, start: int) -> Recorded:
    mask = np.arange(length) >= start
    return Recorded(
        np.full(length, 7, np.int32),
        mask,
        np.where(mask, -0.5, 0).astype(np.float32),
        np.where(mask, 2, -1).astype(np.int32),
    )


def rollout(reward: float, number: int) -> Rollout:
    """Build a rollout of one or two turns whose length grows with its number; the second one of a group is truncated."""
    sequences = [recorded(5 + number, 2)] + ([recorded(9, 4)] if number % 2 else [])
    return Rollout(tuple(sequences), reward, truncated=number == 1)


def batch(advantage: AdvantageConfig, *, finished: int = 1, **filters: object) -> Batch:
    """Build a batch of three groups that finished in the order of their numbers, or in reverse order (-1)."""
    own = Rules(advantage, FilterConfig.model_validate(filters), 100, 1000)
    other = Rules(AdvantageConfig(name="reward"), FilterConfig(), 100, 1000)
    groups = [
        FinishedGroup(
            n + 10, "b" if n == 1 else "a", f"t{n}", 2, 1.0, tuple(rollout(r, i) for i, r in enumerate(rewards))
        )
        for n, rewards in enumerate(REWARDS)
    ]
    return assemble_batch(groups[::finished], step=4, attempt=1, rules={"a": own, "b": other})


def settings(advantage: AdvantageConfig) -> dict[str, AdvantageConfig]:
    return {"a": advantage, "b": AdvantageConfig(name="reward")}


def variants() -> list[AdvantageConfig]:
    """Return each estimator with defaults, with each single option, and with all options."""
    found = []
    for name in ADVANTAGES:
        known = complete_options("advantage", name, {})
        changes = {option: value for option, value in CHANGES.items() if option in known}
        found += [AdvantageConfig(name=name)]
        found += [AdvantageConfig(name=name, options={option: value}) for option, value in changes.items()]
        changes.pop("global_std", None)  # a second division, which the other option excludes
        changes.pop("std", None)
        found += [AdvantageConfig(name=name, options=changes)]
    return found


@pytest.mark.parametrize("advantage", variants(), ids=lambda one: f"{one.name} {one.options}")
def test_explained_stages_end_at_stored_advantage(advantage: AdvantageConfig) -> None:
    made = batch(advantage)
    for index, sample in enumerate(made.samples):
        why = explain_advantage(made, index, settings(advantage))
        assert why is not None
        assert why.equal
        assert why.stored == tuple(sample.advantages[sample.loss_mask].tolist())
        if sample.environment == "a" and advantage.name != "gae":
            assert why.stages[-1].value == why.stored[0]
        assert why.rewards == REWARDS[sample.group - 10]


def test_batch_is_independent_of_finish_order() -> None:
    one, other = (batch(AdvantageConfig(name="reinforce_pp"), finished=order) for order in (1, -1))
    assert one.outcomes == other.outcomes
    for first, second in zip(one.samples, other.samples, strict=True):
        assert (first.group, first.rollout) == (second.group, second.rollout)
        assert (first.advantages == second.advantages).all()


def test_estimators_and_options_have_explanations() -> None:
    assert {*ESTIMATORS, "gae"} == {*ADVANTAGES}
    options = {name for estimator in ADVANTAGES for name in complete_options("advantage", estimator, {})}
    assert options - {*OFF} == {"mean", "std", "leave_one_out", "quantile", "lam", "bootstrap"}, (
        "state the option in the explanation of its estimator, then add it here and to CHANGES"
    )


def test_explanation_contains_numbers_of_the_batch() -> None:
    advantage = AdvantageConfig(name="grpo", options={"std": "group"})
    made = batch(advantage)
    why = explain_advantage(made, 0, settings(advantage))
    assert why is not None
    assert why.stages[1].text == "grpo: 1 - group mean 0.3125, divided by group std 0.473243"
    assert why.stages[1].value == pytest.approx((1 - 0.3125) / 0.47324, rel=1e-4)
    said = report_text(report_sample(made, 0, settings(advantage)), None)
    assert "rewards of its group: 1, 0, 0, 0.25" in said
    assert "advantage 1.45274 in the batch; recomputed: equal" in said
    assert "3 tokens by version 2 (1 behind)" in said
    assert "trained tokens: 3 of 5: prompt 0-1, trained 2-4" in said


def test_explanation_of_quantile_names_the_baseline() -> None:
    advantage = AdvantageConfig(name="qae", options={"quantile": 0.75})
    made = batch(advantage)
    why = explain_advantage(made, 0, settings(advantage))
    assert why is not None
    assert why.stages[1].text == "qae: 1 - group quantile 0.75, 0.25"
    assert why.stages[1].value == 0.75


def test_changed_settings_are_detected() -> None:
    made = batch(AdvantageConfig(name="grpo"))
    why = explain_advantage(made, 0, settings(AdvantageConfig(name="rloo")))
    assert why is not None
    assert not why.equal
    assert "settings were changed later" in report_text(
        report_sample(made, 0, settings(AdvantageConfig(name="rloo"))), None
    )


def test_masked_rollout_names_filter_and_counts_for_group() -> None:
    advantage = AdvantageConfig(name="reinforce_pp_baseline")
    made = batch(advantage, overlong_mask=True)
    masked = next(i for i, sample in enumerate(made.samples) if sample.rollout == 1 and sample.environment == "a")
    why = explain_advantage(made, masked, settings(advantage))
    assert why is not None
    assert why.note == "overlongMask masks the loss of all tokens of this rollout; its reward counts for its group"
    assert all(
        one.equal
        for i in range(len(made.samples))
        if (one := explain_advantage(made, i, settings(advantage))) is not None
    )


def test_batch_of_older_release_gets_outcomes_from_samples() -> None:
    made = batch(AdvantageConfig(name="opo"))
    old = Batch(made.step, made.attempt, made.samples)
    assert outcomes_of(old) == made.outcomes
    why = explain_advantage(old, 0, settings(AdvantageConfig(name="opo")))
    assert why is not None
    assert why.equal


def test_demonstrations_have_no_estimator() -> None:
    made = batch(AdvantageConfig(name="grpo"))
    assert explain_advantage(made, 0, {}) is None
    assert "not estimated" in report_text(report_sample(made, 0, {}), None)
