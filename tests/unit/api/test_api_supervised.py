"""Specification of supervised runs, and the configuration of their roles."""

from __future__ import annotations

from typing import Any

import pytest

from rlrun.api.resolve import resolve_spec
from rlrun.api.resource import RLRunSpec

SFT: dict[str, Any] = {"task": "SFT", "model": {"path": "m"}, "data": {"sources": [{"path": "a.jsonl"}]}}


def test_sft_roles_get_data_without_engine() -> None:
    spec = RLRunSpec.model_validate(SFT | {"algorithm": {"aggregation": "seq_mean_token_mean"}})
    config = resolve_spec(spec, name="run", uid="u", output_dir="/runs/run")
    assert config.inference is None
    assert (config.trainer.task, config.orchestrator.task) == ("SFT", "SFT")
    assert config.orchestrator.data == spec.data
    assert config.trainer.algorithm.effective_loss.name == "sft"
    assert config.trainer.algorithm.aggregation == "seq_mean_token_mean"
    assert type(config).model_validate_json(config.model_dump_json()) == config
    other = RLRunSpec.model_validate(SFT | {"data": {"sources": [{"path": "b.jsonl"}]}})
    assert resolve_spec(other, name="run", uid="u", output_dir="/runs/run").config_hash() != config.config_hash()


def test_custom_loss_replaces_preset_loss() -> None:
    spec = RLRunSpec.model_validate(SFT | {"algorithm": {"loss": {"name": "package.module:loss"}}})
    config = resolve_spec(spec, name="run", uid="u", output_dir="/runs/run")
    assert config.trainer.algorithm.effective_loss.name == "package.module:loss"


@pytest.mark.parametrize(
    ("blocks", "problem"),
    [
        ({"inference": {"gpusPerReplica": 1}}, r"inference.gpusPerReplica \(1\) applies only to task RL; remove it"),
        (
            {"trainer": {"epochsPerStep": 2}},
            r"trainer.epochsPerStep \(2\) applies only to task RL; remove it; set data.epochs instead",
        ),
        ({"sampling": {"temperature": 0.5}}, r"sampling.temperature \(0.5\) applies only to task RL"),
        ({"weightSync": {"timeoutSeconds": 5}}, r"weightSync.timeoutSeconds \(5.0\) applies only to task RL"),
        (
            {"orchestrator": {"batchSize": 8}},
            r"orchestrator.batchSize \(8\) applies only to task RL; remove it; set data.batchSize",
        ),
        ({"algorithm": {"maxAsyncLevel": 0}}, r"algorithm.maxAsyncLevel \(0\) applies only to task RL"),
        ({"algorithm": {"advantage": {"name": "rloo"}}}, r"algorithm.advantage .* applies only to task RL"),
        ({"algorithm": {"preset": "dapo"}}, r"algorithm.preset \(dapo\) needs task RL; remove it or set it to sft"),
    ],
)
def test_rl_only_block_in_sft_is_refused(blocks: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        RLRunSpec.model_validate(SFT | blocks)
