"""Learning of the quickstart, and its failure with a flipped advantage."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.local.local_run import LEARNED_STEPS, SHARED_STEPS, LocalRun, mean, quickstart

START_AT_MOST = 0.6
SHARED_START_AT_MOST = 0.65
"""Bound of the shared run, whose smaller model starts with a held-out reward of up to 0.603 (measured)."""
SHARED_GAIN = 0.07
"""Measured: 0.16 to 0.23 on an idle machine, 0.11 next to the other tiers, where the data is staler. Without learning the difference is 0,
with a standard deviation of 0.02."""
GAIN = 0.2
FLIPPED_STEPS = 16
"""Measured: the reward falls from 0.70 to 0.05 within 13 steps and stays at 0."""


def check_gain(rewards: list[float], gain: float, start_at_most: float = START_AT_MOST) -> None:
    """Check that each ten steps of the last third have at least `gain` more reward than the first five steps."""
    start, last_third = mean(rewards[:5]), rewards[-len(rewards) // 3 :]
    assert start <= start_at_most, rewards
    windows = [mean(last_third[i : i + 10]) for i in range(0, len(last_third) - 9, 10)]
    assert min(windows) >= start + gain, rewards


def test_quickstart_learns(learned: LocalRun) -> None:
    check_gain(learned.rewards(), SHARED_GAIN, SHARED_START_AT_MOST)


@pytest.mark.full
def test_full_quickstart_learns_and_keeps_its_reward(new_run: Callable[..., LocalRun], quickstart_model: Path) -> None:
    run = new_run(quickstart(model_folder=quickstart_model, maxSteps=LEARNED_STEPS))
    run.run()
    check_gain(run.rewards(), GAIN)
    assert run.held_out()[-1][1] >= run.held_out()[0][1] + GAIN, run.held_out()


def test_quickstart_improves_held_out_reward(learned: LocalRun) -> None:
    held_out = learned.held_out()
    assert held_out[0][0] == 0
    assert held_out[0][1] <= SHARED_START_AT_MOST
    assert held_out[-1][0] == SHARED_STEPS
    assert held_out[-1][1] >= held_out[0][1] + SHARED_GAIN, held_out


def test_quickstart_is_asynchronous_within_its_bound(learned: LocalRun) -> None:
    lines = learned.steps()
    assert max(line["off_policy/max"] for line in lines) >= 1
    for rollout, step in ((r, r["step"]) for r in learned.traces()):
        assert rollout["dispatch_version"] >= step - 1 - 8


def test_trainer_and_engine_logprobs_agree(learned: LocalRun) -> None:
    first = learned.steps()[0]
    assert first["off_policy/max"] == 0  # both sides have equal weights
    assert first["mismatch_kl"] <= 1e-3


def test_summary_shows_curve_and_artifacts(learned: LocalRun) -> None:
    assert "learning curve" in learned.output
    assert "held-out reward" in learned.output
    assert f"weights/v{SHARED_STEPS:08}.a0001" in learned.output


@pytest.mark.full
def test_flipped_advantage_does_not_learn(new_run: Callable[..., LocalRun], quickstart_model: Path) -> None:
    run = new_run(
        quickstart(
            model_folder=quickstart_model,
            maxSteps=FLIPPED_STEPS,
            sampling={"temperature": 0.7},
            algorithm={"advantage": {"name": "tests.e2e.local.flipped:advantages"}},
            evaluation={"interval": FLIPPED_STEPS},
        )
    )
    run.run()
    rewards = run.rewards()
    assert mean(rewards[-10:]) < mean(rewards[:3]), rewards
    assert run.held_out()[-1][1] < run.held_out()[0][1]
    # The run samples at temperature 0.7, so trainer and engine must agree about that distribution, not about the raw
    # one.
    assert run.steps()[0]["off_policy/max"] == 0
    assert run.steps()[0]["mismatch_kl"] <= 1e-3
