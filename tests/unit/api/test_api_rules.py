"""Rules between fields of a run: each message names the fields, their values and the fix."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from rlrun.api.resource import NAME_MAX, RLRunSpec, check_name


def spec(**changes: Any) -> RLRunSpec:
    return RLRunSpec(**{"model": {"path": "m"}, "environments": [{"id": "x"}]} | changes)


def test_smallest_specification_is_valid() -> None:
    smallest = spec()
    assert (smallest.max_steps, smallest.seq_len, smallest.orchestrator.batch_size) == (100, 2048, 64)
    assert smallest.orchestrator.batch_size % smallest.environments[0].group_size == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"orchestrator": {"batch_size": 10}},
            "orchestrator.batchSize (10) must be divisible by environments[0].groupSize (8); set batchSize to 8 or 16",
        ),
        (
            {"orchestrator": {"batch_size": 4}},
            "orchestrator.batchSize (4) must be divisible by environments[0].groupSize (8); set batchSize to 8",
        ),
        (
            {"environments": [{"id": "x"}, {"id": "x"}]},
            "several environments have the name 'x'; give each environment its own environments[].name",
        ),
        (
            {"environments": [{"id": "x"}, {"id": "y", "name": "x"}]},
            "several environments have the name 'x'",
        ),
        (
            {"inference": {"tensor_parallel": 4, "data_parallel": 2, "gpus_per_replica": 4}},
            "gpusPerReplica (4) must be tensorParallel x dataParallel (8), or 0 for CPUs",
        ),
        (
            {"weight_sync": {"transport": "NCCL"}, "trainer": {"lora": {"rank": 8}}},
            "weightSync.transport (NCCL) does not transfer adapters; set transport: Filesystem or remove trainer.lora",
        ),
        (
            {"weight_sync": {"transport": "NCCL"}, "inference": {"gpus_per_replica": 1}},
            "connects GPUs with GPUs, or CPUs with CPUs; trainer.gpusPerReplica is 0 and inference.gpusPerReplica is 1",
        ),
        (
            {"inference": {"max_model_len": 100}},
            "inference.maxModelLen (100) must be at least seqLen (2048); raise maxModelLen or remove it",
        ),
        (
            {"trainer": {"micro_batch_tokens": 1024}},
            "trainer.microBatchTokens (1024) must be at least seqLen (2048): a micro-batch must hold at least one sample",
        ),
        (
            {"model": {"tiny": {"max_length": 1024}}},
            "model.tiny.maxLength (1024) must be at least seqLen (2048)",
        ),
        (
            {"sampling": {"max_tokens": 2048}},
            "sampling.maxTokens (2048) must be less than seqLen (2048), which also includes the prompt",
        ),
        (
            {"environments": [{"id": "x", "sampling": {"max_tokens": 4000}}]},
            "environments[0].sampling.maxTokens (4000) must be less than seqLen (2048)",
        ),
        (
            {"environments": [{"id": "x", "algorithm": {"regularizers": {"kl": 0.1}}}]},
            "environments[0].algorithm: regularizers.kl (0.1) needs a reference model, which this run does not have; "
            "set algorithm.reference",
        ),
        (
            {"environments": [{"id": "x", "algorithm": {"aggregation_length": 9}}]},
            "environments[0].algorithm: aggregationLength (9) needs aggregation constant_length; remove it",
        ),
        (
            {
                "environments": [{"id": "x", "algorithm": {"loss": {"name": "dppo"}, "proximal": "recompute"}}],
                "algorithm": {"preset": "grpo"},
            },
            "environments[0].algorithm: proximal (recompute) is not used by loss dppo, which compares with the engine's policy; "
            "set it to inference",
        ),
        (
            {
                "environments": [{"id": "x", "algorithm": {"correction": {"action": "clamp"}}}],
                "algorithm": {"preset": "aipo"},
            },
            "environments[0].algorithm: correction: action clamp would apply the ratio of trainer and engine twice",
        ),
        (
            {
                "environments": [{"id": "x", "algorithm": {"advantage": {"name": "rloo"}}}],
                "algorithm": {"preset": "ppo", "advantage": {"name": "gae"}, "critic": {}},
            },
            "environments[0].algorithm: advantage (rloo) cannot replace the run's advantage gae, because its critic is trained",
        ),
    ],
)
def test_rules_between_fields(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError) as error:
        spec(**changes)
    assert message in str(error.value)


def test_limit_values_of_rules_are_valid() -> None:
    valid = spec(
        inference={"max_model_len": 2048},
        trainer={"micro_batch_tokens": 2048},
        sampling={"max_tokens": 2047},
        environments=[{"id": "x"}, {"id": "x", "name": "second", "group_size": 64}],
    )
    assert [environment.label for environment in valid.environments] == ["x", "second"]


@pytest.mark.parametrize("name", ["a", "a-1", "gsm8k-7b", "a" * NAME_MAX])
def test_names_that_fit(name: str) -> None:
    assert check_name(name) == name


@pytest.mark.parametrize("name", ["", "A", "1a", "-a", "a-", "a_b", "a.b", "a\n", "ä", "a" * (NAME_MAX + 1)])
def test_names_that_do_not(name: str) -> None:
    with pytest.raises(ValueError, match=r"RFC 1035|at most 40"):
        check_name(name)
