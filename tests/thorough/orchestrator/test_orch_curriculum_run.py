"""Curricula in the whole orchestrator: order of samples after kills, metrics, and a run with only filtered groups."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from orch_simulation import FakeEngine, Outcome, make_config, simulate

from rlrun.config.models.roles import OrchestratorConfig
from rlrun.orchestrator.attempt import first_cause
from rlrun.orchestrator.groups import groups
from rlrun.protocol.files.failures import RoleError
from rlrun.runtime import exit_codes

CURRICULUM = {
    "warmup_steps": 3,
    "easy": {"threshold": 1, "fraction": 0.1, "train": False},
    "hard": {"threshold": 0.25, "fraction": 0.25},
}


def make_graded_config(root: Path, tokenizer: Path, **changes: Any) -> OrchestratorConfig:
    environments = [
        {"id": "orch_environments:graded", "group_size": 2, "ratio": 2, "curriculum": CURRICULUM},
        {"id": "reverse-text", "group_size": 2},
    ]
    return make_config(root, tokenizer, **{"environments": environments, "max_steps": 8, **changes})


def read_trained_tasks(outcome: Outcome) -> dict[int, dict[int, str]]:
    """Return step -> group -> task."""
    return {batch.step: {s.group: s.task_id for s in batch.samples} for batch in outcome.trainer.batches}


async def test_killed_run_trains_the_same_tasks_per_step(tmp_path: Path, tokenizer_folder: Path) -> None:
    synchronous = {"max_async_level": 0, "max_off_policy_steps": 0}
    whole = await simulate(make_graded_config(tmp_path / "whole", tokenizer_folder, algorithm=synchronous))
    config = make_graded_config(tmp_path / "killed", tokenizer_folder, algorithm=synchronous)
    rng = random.Random(7)
    found: dict[int, dict[int, str]] = {}
    for number, kill_after in enumerate((1, 2, 3, 2, None), start=1):
        outcome = await simulate(
            config,
            engines=[FakeEngine(lambda: rng.random() / 1000)],
            number=number,
            until=(lambda trainer, n=kill_after: len(trainer.batches) >= n) if kill_after else None,
        )
        found |= read_trained_tasks(outcome)
    assert outcome.code == exit_codes.OK
    assert found == read_trained_tasks(whole)


async def test_pools_and_filtered_groups_are_in_metrics(tmp_path: Path, tokenizer_folder: Path) -> None:
    outcome = await simulate(make_graded_config(tmp_path, tokenizer_folder))
    lines = [json.loads(line) for line in outcome.paths.metrics.read_text().splitlines()]
    assert sum(line["groups/dropped/too_easy"] for line in lines) > 0
    pools = {name: lines[-1][f"pools/orch_environments:graded/{name}"] for name in ("easy", "normal", "hard")}
    assert sum(pools.values()) == 12
    assert min(pools.values()) > 0
    assert "pools/reverse-text/easy" not in lines[-1]
    own = [s for batch in outcome.trainer.batches for s in batch.samples if s.environment != "reverse-text"]
    assert {sample.reward for sample in own} == {0.0, 0.25, 0.5, 0.75}


async def test_recovered_batches_update_the_task_pools(tmp_path: Path, tokenizer_folder: Path) -> None:
    config = make_graded_config(
        tmp_path, tokenizer_folder, checkpoint={"interval": 100}, algorithm={"max_async_level": 2}
    )
    first = await simulate(config, until=lambda trainer: len(trainer.batches) >= 3, step_seconds=lambda: 0.01)
    second = await simulate(config, number=2)
    again = {
        step: groups
        for step, groups in read_trained_tasks(second).items()
        if groups == read_trained_tasks(first).get(step)
    }
    assert 1 in again  # batches of the model's own tokens are reused
    lines = [json.loads(line) for line in second.paths.metrics.read_text().splitlines()]
    assert sum(lines[-1][f"pools/orch_environments:graded/{name}"] for name in ("easy", "hard")) > 0


async def test_run_with_only_filtered_groups_ends_with_reason(
    tmp_path: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(groups, "MAX_FILTERED_BATCHES", 3)
    environments = [
        {
            "id": "orch_environments:constant",
            "group_size": 2,
            "curriculum": {"easy": {"threshold": 1, "train": False}},
        }
    ]
    with pytest.raises(ExceptionGroup) as caught:
        await simulate(make_config(tmp_path, tokenizer_folder, environments=environments))
    cause = first_cause(caught.value)
    assert isinstance(cause, RoleError)
    assert cause.code == exit_codes.DATA
    assert "the last 24 rollouts were all filtered (too_easy: 24)" in str(cause)
