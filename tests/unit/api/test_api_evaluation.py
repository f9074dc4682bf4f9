"""Specification of tasks of kind Eval, and the configuration of their roles."""

from __future__ import annotations

from typing import Any

import pytest

from rlrun.api.resolve import resolve_spec
from rlrun.api.resource import RLRunSpec

EVAL: dict[str, Any] = {"task": "Eval", "model": {"path": "m"}, "environments": [{"id": "reverse-text"}]}


def test_eval_roles_get_policies_and_engines() -> None:
    blocks = {"policies": {"fromRun": "taught", "steps": [10, 20]}, "evaluation": {"samplesPerTask": 4}}
    spec = RLRunSpec.model_validate(EVAL | blocks | {"trainer": {"lora": {"rank": 8}}})
    config = resolve_spec(spec, name="run", uid="u", output_dir="/runs/run")
    assert config.orchestrator.policies == spec.policies
    assert config.orchestrator.evaluation == spec.evaluation
    assert config.inference is not None
    assert config.inference.lora is not None
    assert config.inference.lora.rank == 8
    assert type(config).model_validate_json(config.model_dump_json()) == config


def test_eval_accepts_environments_copied_from_training_run() -> None:
    """The group size is irrelevant, because an evaluation makes no batches."""
    copied = {"id": "reverse-text", "groupSize": 7, "ratio": 2.0, "curriculum": {"warmupSteps": 3}}
    assert RLRunSpec.model_validate(EVAL | {"environments": [copied]}).environments[0].group_size == 7


@pytest.mark.parametrize(
    ("blocks", "problem"),
    [
        ({"maxSteps": 5}, r"maxSteps \(5\) applies only to tasks that train; remove it"),
        (
            {"trainer": {"gpusPerReplica": 1}},
            r"trainer.gpusPerReplica \(1\) applies only to tasks that train; remove it",
        ),
        ({"trainer": {"env": [{"name": "A", "value": "b"}]}}, r"trainer.env .* applies only to tasks that train"),
        ({"trainer": {"lora": {"slots": 2}}}, r"trainer.lora.slots \(2\) applies only to tasks that train"),
        (
            {"trainer": {"lora": {}, "sharedWith": "host"}},
            r"trainer.sharedWith \(host\) applies only to tasks that train",
        ),
        ({"algorithm": {"preset": "dapo"}}, r"algorithm.preset \(dapo\) applies only to tasks that train"),
        ({"orchestrator": {"batchSize": 8}}, r"orchestrator.batchSize \(8\) applies only to tasks that train"),
        ({"checkpoint": {"interval": 5}}, r"checkpoint.interval \(5\) applies only to tasks that train"),
        ({"weightSync": {"transport": "NCCL"}}, r"weightSync.transport \(NCCL\) applies only to tasks that train"),
        ({"evaluation": {"timeoutSeconds": 5}}, r"evaluation.timeoutSeconds \(5.0\) applies only to tasks that train"),
        ({"evaluation": {"interval": 5}}, r"evaluation.interval \(5\) applies only to tasks that train"),
        ({"environments": []}, r"environments is empty, but task Eval needs at least one"),
        ({"data": {"sources": [{"path": "a"}]}}, r"data needs task SFT"),
        ({"policies": {"steps": [1]}}, r"(?s)policies.fromRun.*Field required"),
    ],
)
def test_unused_block_in_eval_is_refused(blocks: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        RLRunSpec.model_validate(EVAL | blocks)


@pytest.mark.parametrize(
    "blocks",
    [
        {"orchestrator": {"maxConcurrency": 4, "env": [{"name": "A", "value": "b"}]}},
        {"checkpoint": {"gracePeriodSeconds": 5}, "weightSync": {"timeoutSeconds": 5}},
        {"inference": {"replicas": 3, "gpusPerReplica": 2, "tensorParallel": 2}},
    ],
)
def test_used_block_in_eval_is_accepted(blocks: dict[str, Any]) -> None:
    assert RLRunSpec.model_validate(EVAL | blocks).task == "Eval"


def test_policies_in_training_run_are_refused() -> None:
    trains = {"model": {"path": "m"}, "environments": [{"id": "x"}], "policies": {"fromRun": "a"}}
    with pytest.raises(ValueError, match=r"policies needs a task without training, but task is RL; remove it or set"):
        RLRunSpec.model_validate(trains)
