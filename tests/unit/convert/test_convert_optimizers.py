"""Conversion of optimizers, schedules and warm-up: equal updates, or a refusal with equivalent values."""

from __future__ import annotations

from typing import Any

import pytest

from rlrun.api.run_manifest import parse_manifest
from rlrun.convert.compose.shared_parts import Context
from rlrun.convert.conversion import Converted, convert_settings
from rlrun.convert.readers.hydra import Setting

OPTIM = "actor_rollout_ref.actor.optim."
VERL: dict[str, Any] = {
    "data.train_files": "/srv/data/x/train.parquet",
    "actor_rollout_ref.model.path": "Qwen/Qwen3-8B",
    "algorithm.adv_estimator": "grpo",
    "trainer.total_training_steps": 100,
}
SFT: dict[str, Any] = {"data.train_files": "/srv/data/x.parquet", "model.path": "Qwen/Qwen3-8B"}
AREAL: dict[str, Any] = {
    "train_dataset.path": "openai/gsm8k",
    "train_dataset.batch_size": 8,
    "actor.path": "Qwen/Qwen3-8B",
    "total_train_steps": 100,
    "allocation_mode": "vllm:d1+fsdp:d1",
}
EQUAL = {"optimizer": "muon", "muon_nesterov": True, "muon_extra_scale_factor": 0.2}


def result(base: dict[str, Any], changes: dict[str, Any]) -> Converted:
    return convert_settings([Setting(*item, "t") for item in (base | changes).items()], Context("run", 100), ["t"])


def optimizer(found: Converted) -> Any:
    assert found.refused == []
    return parse_manifest(found.text, "t")[0].spec.trainer.optimizer


@pytest.mark.parametrize(("base", "block"), [(VERL, OPTIM), (SFT, "optim.")])
def test_muon_of_verl_with_equal_updates(base: dict[str, Any], block: str) -> None:
    found = result(base, {block + key: value for key, value in (EQUAL | {"muon_momentum": 0.9}).items()})
    assert (optimizer(found).name, optimizer(found).momentum) == ("muon", 0.9)
    assert any("coefficients of `simple`" in notice for notice in found.notices)


@pytest.mark.parametrize(
    ("changes", "reasons"),
    [
        ({"muon_nesterov": None}, ["muon_nesterov is false", f"add {OPTIM}muon_nesterov=true"]),
        ({"muon_extra_scale_factor": None}, ["muon_extra_scale_factor is 1.0, in RLRun 0.2"]),
        ({"muon_extra_scale_factor": None, "muon_match_adamw_update_rms": True}, ["is 0.2294", "update_rms=false"]),
        ({"muon_scale_mode": "unit_rms_norm"}, ["muon_scale_mode is unit_rms_norm, in RLRun spectral"]),
        ({"muon_num_ns_steps": 10}, ["muon_num_ns_steps is 10, in RLRun 5"]),
        ({"muon_split_qkv": False}, ["muon_split_qkv is false"]),
    ],
)
def test_muon_of_verl_with_other_updates_is_refused(changes: dict[str, Any], reasons: list[str]) -> None:
    found = result(VERL, {OPTIM + key: value for key, value in (EQUAL | changes).items()})
    (refused,) = found.refused
    assert refused.setting.key == OPTIM + "optimizer"
    assert [reason for reason in reasons if reason not in refused.note] == []


def test_muon_of_areal() -> None:
    keys = {"actor.optimizer.type": "muon", "actor.optimizer.lr": 0.02, "actor.optimizer.muon_momentum": 0.9}
    found = optimizer(result(AREAL, keys))
    assert (found.name, found.momentum, found.lr) == ("muon", 0.9, 0.02)
    for key, value in (("muon_backend_lr", 3e-4), ("muon_scale_mode", "spectral"), ("muon_use_nesterov", False)):
        (refused,) = result(AREAL, keys | {f"actor.optimizer.{key}": value}).refused
        assert refused.setting.key == "actor.optimizer.type"
        assert f"{key} is" in refused.note


@pytest.mark.parametrize(
    ("base", "key", "value"),
    [
        (VERL, OPTIM + "optimizer", "Lion"),
        (VERL, OPTIM + "lr_scheduler_type", "wsd"),
        (SFT, "optim.lr_scheduler_type", "wsd"),
        (AREAL, "actor.optimizer.type", "adafactor"),
    ],
)
def test_optimizer_or_schedule_without_a_counterpart_is_refused(base: dict[str, Any], key: str, value: str) -> None:
    (refused,) = result(base, {key: value}).refused
    assert (refused.setting.key, "does not support this value" in refused.note) == (key, True)


@pytest.mark.parametrize(("ratio", "steps"), [(0.05, 5), (0.059, 5), (0.29, 28), (0.001, 0)])
def test_share_of_warmup_is_cut_off_as_there(ratio: float, steps: int) -> None:
    for base, key in ((VERL, OPTIM + "lr_warmup_steps_ratio"), (AREAL, "actor.optimizer.warmup_steps_proportion")):
        found = parse_manifest(result(base, {key: ratio}).text, "t")[0].spec
        assert found.trainer.scheduler.warmup_steps == steps
