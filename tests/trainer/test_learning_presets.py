"""Learning of every preset, and its failure with a flipped advantage (for a distillation: a flipped pull to the
teacher).
"""

from __future__ import annotations

import pytest
from torch import nn

from rlrun.config.algorithm.names import PRESETS
from tests.trainer.preset_learning import FLIPPED_STEPS, LOST, REACHED, START, STEPS, make_policy, reached, train

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def student(tmp_path_factory: pytest.TempPathFactory) -> nn.Module:
    return make_policy(tmp_path_factory.mktemp("student") / "model", 0.6)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> nn.Module:
    return make_policy(tmp_path_factory.mktemp("teacher") / "model", 0.9)


@pytest.mark.parametrize("preset", PRESETS)
def test_preset_learns_and_flipped_sign_does_not(preset: str, student: nn.Module, teacher: nn.Module) -> None:
    rewards = train(preset, student, teacher, sign=1.0, steps=STEPS)
    flipped = train(preset, student, teacher, sign=-1.0, steps=FLIPPED_STEPS)
    assert rewards[0] == flipped[0] < START
    assert reached(rewards) > REACHED, rewards
    assert flipped[-1] < LOST, flipped
