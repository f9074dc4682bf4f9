"""`trainer.router`: defaults, and refusals of settings that have no effect or are not supported."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from rlrun.config.models.checkpoint import CheckpointConfig
from rlrun.config.models.language_models import ModelConfig
from rlrun.config.models.learning import AlgorithmConfig
from rlrun.config.models.roles import TrainerConfig, TrainerSpec


def make_config(**values: Any) -> TrainerConfig:
    shared = {
        "name": "run",
        "uid": "uid",
        "output_dir": "out",
        "model": ModelConfig(path="model"),
        "max_steps": 3,
        "seq_len": 32,
        "seed": 0,
        "algorithm": AlgorithmConfig(),
        "checkpoint": CheckpointConfig(),
    }
    return TrainerConfig(**shared | values)


def test_routes_are_not_replayed_by_default() -> None:
    assert TrainerSpec().router.replay == "Off"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"router": {"replay": "Step"}, "updates_per_step": 2, "replicas": 2, "parallelism": {"pp": 2}},
            r"router.replay \(Step\) .* parallelism.pp \(2\) .*; set router.replay: Rollout or pp: 1",
        ),
        (
            {"router": {"replay": "Step"}},
            r"router.replay \(Step\) has no effect with updatesPerStep \(1\).*updatesPerStep: 2 or more",
        ),
        (
            {"router": {"replay": "Rollout"}, "lora": {"slots": 2}},
            r"router.replay \(Rollout\) .* lora.slots is 2; set router.replay: Off or lora.slots: 1",
        ),
        (
            {"router": {"replay": "Rollout"}, "lora": {"rank": 8}, "shared_with": "host"},
            r"router.replay \(Rollout\) is not supported with sharedWith \(host\); set router.replay: Off",
        ),
        (
            {"router": {"freeze": True}, "lora": {"rank": 8}},
            r"router.freeze \(true\) .* lora, .*; set router.freeze: false",
        ),
        ({"router": {"bias": "Update"}, "lora": {"rank": 8}}, r"router.bias \(Update\) .*; set router.bias: Frozen"),
        ({"router": {"aux_loss": 0.1}, "lora": {"rank": 8}}, r"router.auxLoss \(0.1\) .*; set router.auxLoss: 0"),
        (
            {"router": {"aux_loss": 0.1}, "replicas": 2, "parallelism": {"tp": 2}},
            r"router.auxLoss \(0.1\) is not supported with parallelism.tp \(2\); set parallelism.tp: 1",
        ),
        (
            {"router": {"aux_loss": 0.1}, "replicas": 2, "parallelism": {"pp": 2}},
            r"router.auxLoss \(0.1\) is not supported with parallelism.pp \(2\); set parallelism.pp: 1",
        ),
        ({"router": {"bias_rate": 0.1}}, r"biasRate \(0.1\) has no effect with bias \(Frozen\)"),
        ({"router": {"freeze": True, "aux_loss": 0.1}}, r"auxLoss \(0.1\) has little effect on frozen routers"),
    ],
)
def test_router_settings_without_effect_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        TrainerSpec(**values)


def test_step_replay_needs_the_first_pass() -> None:
    step = {"router": {"replay": "Step"}, "updates_per_step": 2}
    with pytest.raises(
        ValidationError, match=r"router.replay \(Step\) needs the pass of algorithm.proximal: recompute"
    ):
        make_config(**step, algorithm=AlgorithmConfig(proximal="inference"))
    assert make_config(**step, algorithm=AlgorithmConfig(preset="gspo")).router.replay == "Step"


def test_rollout_replay_is_refused_in_supervised_fine_tuning() -> None:
    with pytest.raises(ValidationError, match=r"router.replay \(Rollout\) needs tokens that an engine sampled"):
        make_config(router={"replay": "Rollout"}, task="SFT", algorithm=AlgorithmConfig(preset="sft"))
