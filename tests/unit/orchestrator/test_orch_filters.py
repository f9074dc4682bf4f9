"""Rollout filters, length penalties and algorithm options of each environment."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rlrun.config.models.environment_algorithm import EnvironmentAlgorithm
from rlrun.config.models.learning import AdvantageConfig, AlgorithmConfig, FilterConfig, RegularizerConfig
from rlrun.config.models.roles import OrchestratorConfig
from rlrun.config.models.rollout import EnvironmentConfig, SamplingConfig
from rlrun.orchestrator.batches.assemble import assemble_batch
from rlrun.orchestrator.groups.filters import (
    Rules,
    filter_metrics,
    is_gibberish,
    overlong_penalty,
    reason_to_drop,
    repeats_itself,
    rules_of,
    shaped_reward,
)
from rlrun.orchestrator.types import FinishedGroup, Recorded, Rollout

VOCABULARY = 1000


def rollout(
    reward: float, mask: str = ".xxx", *, logprob: float = -0.5, truncated: bool = False, token: int = 7
) -> Rollout:
    """Build one rollout; `x` marks tokens that the policy sampled."""
    sampled = np.array([letter == "x" for letter in mask])
    recorded = Recorded(
        np.full(len(mask), token, np.int32),
        sampled,
        np.where(sampled, logprob, 0).astype(np.float32),
        np.where(sampled, 0, -1).astype(np.int32),
    )
    return Rollout((recorded,), reward, truncated=truncated)


def rules(name: str = "grpo", *, max_tokens: int = 100, **filters: object) -> Rules:
    return Rules(AdvantageConfig(name=name), FilterConfig.model_validate(filters), max_tokens, VOCABULARY)


def group(number: int, *rollouts: Rollout, environment: str = "a") -> FinishedGroup:
    return FinishedGroup(number, environment, "t", 0, 1.0, rollouts)


@pytest.mark.parametrize(
    ("tokens", "penalty"), [(0, 0.0), (60, 0.0), (80, 0.0), (85, -0.5), (90, -1.0), (100, -2.0), (110, -3.0)]
)
def test_overlong_penalty_rises_within_buffer(tokens: int, penalty: float) -> None:
    assert overlong_penalty(tokens, max_tokens=100, buffer=0.2, factor=2.0) == pytest.approx(penalty)


def test_overlong_penalty_uses_longest_reply_and_keeps_recorded_reward() -> None:
    own = rules(max_tokens=4, overlong_penalty=1.0, overlong_buffer=0.5)
    long, turns = rollout(1.0, ".xxxx"), rollout(1.0, ".xx.xx.xx")
    assert shaped_reward(long, own) == 0.0
    assert shaped_reward(turns, own) == 1.0
    assert shaped_reward(long, rules(max_tokens=4)) == 1.0
    batch = assemble_batch([group(0, long, turns)], step=1, attempt=1, rules={"a": own})
    assert [sample.reward for sample in batch.samples] == [1.0, 1.0]
    assert [float(sample.advantages[1]) for sample in batch.samples] == [-0.5, 0.5]


def test_masked_rollout_counts_in_group_baseline_without_loss() -> None:
    groups = [group(0, rollout(1.0), rollout(0.0, truncated=True))]
    kept, cut = assemble_batch(groups, step=1, attempt=1, rules={"a": rules(overlong_mask=True)}).samples
    assert float(kept.advantages[1]) == 0.5
    assert not cut.loss_mask.any()
    cut.check()
    assert cut.versions.tolist() == [-1] * 4
    assert not cut.logprobs.any()
    both = assemble_batch(groups, step=1, attempt=1, rules={"a": rules()}).samples
    assert both[1].loss_mask.tolist() == [False, True, True, True]


def test_repetition_is_a_run_of_sure_tokens() -> None:
    sure = rollout(1.0, ".xxxxx", logprob=-0.001)
    assert repeats_itself(sure, window=5)
    assert not repeats_itself(sure, window=6)
    assert not repeats_itself(rollout(1.0, ".xxxxx", logprob=-0.02), window=2)
    assert not repeats_itself(
        rollout(1.0, ".xxx.xx", logprob=-0.001), window=4
    )  # a turn of another speaker ends the run


def test_gibberish_is_a_rare_token_of_very_low_probability() -> None:
    assert is_gibberish(rollout(1.0, token=100_001, logprob=-9.0), vocabulary=VOCABULARY)  # log 1000 + 2 = 8.9
    assert not is_gibberish(rollout(1.0, token=100_001, logprob=-8.8), vocabulary=VOCABULARY)
    assert not is_gibberish(rollout(1.0, token=100_000, logprob=-9.0), vocabulary=VOCABULARY)


@pytest.mark.parametrize(
    ("filters", "bad"),
    [
        ({"overlong_mask": True}, rollout(0.0, truncated=True)),
        ({"repetition_mask": True, "repetition_window": 3}, rollout(0.0, logprob=-0.001)),
        ({"gibberish_mask": True}, rollout(0.0, token=200_000, logprob=-20.0)),
    ],
)
def test_group_without_trainable_tokens_is_replaced(filters: dict[str, object], bad: Rollout) -> None:
    own = rules(**filters)
    good = rollout(1.0)
    assert reason_to_drop(group(0, bad, replace(bad, reward=1.0)), own) == "masked"
    assert reason_to_drop(group(0, bad, good), own) is None
    assert reason_to_drop(group(0, bad, replace(bad, reward=1.0)), rules()) is None
    assert filter_metrics([group(0, bad, good), group(1, good, good)], {"a": own})["batch/masked"] == 0.25


def test_zero_variance_groups_are_replaced_if_filter_is_set() -> None:
    equal = group(0, rollout(1.0), rollout(1.0))
    assert reason_to_drop(equal, rules(zero_variance=True)) == "zero_variance"
    assert reason_to_drop(equal, rules()) is None


def test_monitors_report_without_masking() -> None:
    rare = rollout(0.0, token=200_000, logprob=-20.0)
    sure = rollout(1.0, "." + 512 * "x", logprob=-0.001)
    found = filter_metrics([group(0, rare, sure), group(1, rollout(1.0), rollout(1.0))], {"a": rules()})
    assert found == {"batch/repetition": 0.25, "batch/gibberish": 0.25, "batch/masked": 0.0}


def test_each_environment_uses_its_own_advantage() -> None:
    settings = {"a": rules("reinforce_pp"), "b": rules("rloo"), "c": rules("reinforce_pp")}
    groups = [
        group(0, rollout(1.0), rollout(0.0), environment="a"),
        group(1, rollout(4.0), rollout(0.0), environment="b"),
        group(2, rollout(1.0), rollout(0.0), environment="c"),
    ]
    values = [float(s.advantages[1]) for s in assemble_batch(groups, step=1, attempt=1, rules=settings).samples]
    half = 0.5 / 0.52223  # whitened together, over tokens: mean 1/2, std of three of each of [1, 0, 1, 0]
    assert values == pytest.approx([half, -half, 4.0, -4.0, half, -half], abs=1e-4)


def test_gae_batch_stores_rewards_as_advantages() -> None:
    own = rules("gae", max_tokens=4, overlong_penalty=1.0, overlong_buffer=0.5)
    groups = [group(0, rollout(1.0, ".xxxx"), rollout(0.5, ".xx"))]
    first, second = assemble_batch(groups, step=1, attempt=1, rules={"a": own}).samples
    assert first.advantages.tolist() == [0, 0, 0, 0, 0]
    assert second.advantages.tolist() == [0, 0.5, 0.5]


def test_rules_follow_preset_run_and_environment() -> None:
    own = EnvironmentAlgorithm(advantage=AdvantageConfig(name="opo"), filters=FilterConfig(overlong_mask=True))
    environments = [
        EnvironmentConfig(id="reverse-text"),
        EnvironmentConfig(id="arithmetic", algorithm=own, sampling=SamplingConfig(max_tokens=9)),
    ]
    config = OrchestratorConfig.model_construct(
        algorithm=AlgorithmConfig(preset="dapo"), environments=environments, sampling=SamplingConfig(max_tokens=5)
    )
    found = rules_of(config, vocabulary=VOCABULARY)
    assert found["reverse-text"] == Rules(
        AdvantageConfig(name="grpo", options={"std": "group"}),
        FilterConfig(zero_variance=True, overlong_penalty=1.0),
        5,
        VOCABULARY,
    )
    assert found["arithmetic"] == Rules(AdvantageConfig(name="opo"), FilterConfig(overlong_mask=True), 9, VOCABULARY)


def test_kl_in_reward_leaves_batch_advantages_unnormalized() -> None:
    """The trainer adds the KL penalty and normalizes afterwards; an environment without KL is normalized here."""
    own = EnvironmentAlgorithm(regularizers=RegularizerConfig())
    environments = [EnvironmentConfig(id="reverse-text"), EnvironmentConfig(id="arithmetic", algorithm=own)]
    algorithm = AlgorithmConfig.model_validate(
        {
            "advantage": {"name": "reinforce_pp", "options": {"gamma": 0.9, "neg_clipped": True}},
            "reference": {},
            "regularizers": {"kl_reward": 0.1},
        }
    )
    config = OrchestratorConfig.model_construct(
        algorithm=algorithm, environments=environments, sampling=SamplingConfig(max_tokens=5)
    )
    found = rules_of(config, vocabulary=VOCABULARY)
    before = {"gamma": 0.9, "neg_clipped": False, "adv_mean": "none", "adv_std": "none"}
    assert found["reverse-text"].advantage == AdvantageConfig(name="reinforce_pp", options=before)
    assert found["arithmetic"].advantage == algorithm.advantage
