"""An advantage explained: for every estimator the numbers of the batch, and stages that end there."""

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
    """A rollout of one or two turns, the longer the higher its number; the second of a group was cut off."""
    sequences = [recorded(5 + number, 2)] + ([recorded(9, 4)] if number % 2 else [])
    return Rollout(tuple(sequences), reward, truncated=number == 1)


def batch(advantage: AdvantageConfig, *, finished: int = 1, **filters: object) -> Batch:
    """The batch of three groups, which finished in the order of their numbers, or in the other (-1)."""
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
    """Every estimator: as it is, with each of its options alone, and with all of them."""
    found = []
    for name in ADVANTAGES:
        known = complete_options("advantage", name, {})
        changes = {option: value for option, value in CHANGES.items() if option in known}
        found += [AdvantageConfig(name=name)]
        found += [AdvantageConfig(name=name, options={option: value}) for option, value in changes.items()]
        changes.pop("global_std", None)  # a second division, which the other refuses
        changes.pop("std", None)
        found += [AdvantageConfig(name=name, options=changes)]
    return found


@pytest.mark.parametrize("advantage", variants(), ids=lambda one: f"{one.name} {one.options}")
def test_the_numbers_are_those_of_the_batch_and_the_stages_end_there(advantage: AdvantageConfig) -> None:
    made = batch(advantage)
    for index, sample in enumerate(made.samples):
        why = explain_advantage(made, index, settings(advantage))
        assert why is not None
        assert why.equal
        assert why.stored == tuple(sample.advantages[sample.loss_mask].tolist())
        if sample.environment == "a" and advantage.name != "gae":
            assert why.stages[-1].value == why.stored[0]
        assert why.rewards == REWARDS[sample.group - 10]


def test_a_batch_does_not_depend_on_what_finished_first() -> None:
    one, other = (batch(AdvantageConfig(name="reinforce_pp"), finished=order) for order in (1, -1))
    assert one.outcomes == other.outcomes
    for first, second in zip(one.samples, other.samples, strict=True):
        assert (first.group, first.rollout) == (second.group, second.rollout)
        assert (first.advantages == second.advantages).all()


def test_every_estimator_has_words() -> None:
    assert {*ESTIMATORS, "gae"} == {*ADVANTAGES}
    options = {name for estimator in ADVANTAGES for name in complete_options("advantage", estimator, {})}
    assert options - {*OFF} == {"mean", "std", "leave_one_out", "lam", "bootstrap"}, "an option that no stage turns off"


def test_the_arithmetic_has_the_numbers_put_in() -> None:
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


def test_other_settings_than_those_of_the_batch_are_found_out() -> None:
    made = batch(AdvantageConfig(name="grpo"))
    why = explain_advantage(made, 0, settings(AdvantageConfig(name="rloo")))
    assert why is not None
    assert not why.equal
    assert "settings were changed later" in report_text(
        report_sample(made, 0, settings(AdvantageConfig(name="rloo"))), None
    )


def test_a_filter_is_named_and_its_rollout_counts_for_the_others() -> None:
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


def test_a_batch_of_an_older_release_tells_its_outcomes_by_its_samples() -> None:
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
