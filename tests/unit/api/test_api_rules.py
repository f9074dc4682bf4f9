"""The rules between fields of a run: each names the fields, their values and the fix."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from rlrun.api.resource import NAME_MAX, RLRunSpec, check_name


def spec(**changes: Any) -> RLRunSpec:
    return RLRunSpec(**{"model": {"path": "m"}, "environments": [{"id": "x"}]} | changes)


def test_the_smallest_specification() -> None:
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
            "several environments are called 'x'; give each its own environments[].name",
        ),
        (
            {"environments": [{"id": "x"}, {"id": "y", "name": "x"}]},
            "several environments are called 'x'",
        ),
        (
            {"inference": {"max_model_len": 100}},
            "inference.maxModelLen (100) must be at least seqLen (2048); raise maxModelLen or remove it",
        ),
        (
            {"trainer": {"micro_batch_tokens": 1024}},
            "trainer.microBatchTokens (1024) must be at least seqLen (2048): one sample must fit a micro-batch",
        ),
        (
            {"model": {"tiny": {"max_length": 1024}}},
            "model.tiny.maxLength (1024) must be at least seqLen (2048)",
        ),
        (
            {"sampling": {"max_tokens": 2048}},
            "sampling.maxTokens (2048) must be less than seqLen (2048), which holds the prompt too",
        ),
        (
            {"environments": [{"id": "x", "sampling": {"max_tokens": 4000}}]},
            "environments[0].sampling.maxTokens (4000) must be less than seqLen (2048)",
        ),
    ],
)
def test_rules_between_fields(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError) as error:
        spec(**changes)
    assert message in str(error.value)


def test_the_ends_of_the_rules_are_valid() -> None:
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
