"""Learning rate as a function of the step."""

import math

import pytest

from rlrun.config.models.learning import SchedulerConfig
from rlrun.trainer.learning.lr_schedule import learning_rate


def rates(max_steps: int = 10, **options: object) -> list[float]:
    config = SchedulerConfig.model_validate(options)
    return [learning_rate(config, 1.0, step, max_steps) for step in range(1, max_steps + 1)]


def test_constant_schedule_keeps_the_peak() -> None:
    assert rates() == [1.0] * 10


def test_warm_up_rises_linearly_from_a_positive_rate() -> None:
    assert rates(warmup_steps=4)[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_linear_schedule_reaches_its_floor_at_the_end() -> None:
    decay = rates(name="linear", warmup_steps=2, min_lr_ratio=0.2)
    assert decay[1] == 1.0
    assert decay[-1] == pytest.approx(0.2)
    assert decay[5] == pytest.approx(0.6)


def test_cosine_schedule_is_half_in_the_middle() -> None:
    decay = rates(name="cosine", warmup_steps=2)
    assert decay[5] == pytest.approx(0.5)
    assert decay[-1] == pytest.approx(0.0, abs=1e-12)
    assert decay[2] == pytest.approx(0.5 * (1 + math.cos(math.pi / 8)))


def test_warm_up_longer_than_run_only_rises() -> None:
    assert rates(name="cosine", warmup_steps=20)[-1] == pytest.approx(0.5)
