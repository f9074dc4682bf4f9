"""Explanations of a rollout's advantage from the batch of its step, without a model or user code."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlrun.config.models.checkpoint import CheckpointConfig, WeightSyncConfig
from rlrun.config.models.language_models import ModelConfig
from rlrun.config.models.learning import AdvantageConfig, AlgorithmConfig
from rlrun.config.models.roles import OrchestratorConfig
from rlrun.config.models.rollout import EnvironmentConfig, SamplingConfig
from rlrun.protocol.files.batch import Batch, Outcome, write_batch
from rlrun.ui.static_files import StaticFiles
from tests.support.made_runs import SHAPED, Client, Folder, client, made, sample

REWARDS = (1.0, 0.0, 0.0, 0.0)


@pytest.fixture
def run(tmp_path: Path) -> Folder:
    """Write group 1 of step 3 with four rollouts, the first of which is correct."""
    folder = made(tmp_path / "runs" / "demo")
    configured(folder, AdvantageConfig(name="rloo"))
    samples = []
    for number, reward in enumerate(REWARDS):
        one = sample(1, number, [1, 2, 3, 4])
        value = 1.0 if reward else -1 / 3
        samples.append(replace(one, reward=reward, advantages=np.where(one.loss_mask, value, 0).astype(np.float32)))
    outcomes = tuple(Outcome(1, number, "math", reward, 2, 1) for number, reward in enumerate(REWARDS))
    folder.paths.rollouts.mkdir()
    write_batch(folder.paths.batch(3, 1), Batch(3, 1, tuple(samples), outcomes=outcomes))
    return folder


def configured(folder: Folder, advantage: AdvantageConfig) -> None:
    config = OrchestratorConfig(
        name="demo",
        uid="u",
        output_dir=str(folder.root),
        model=ModelConfig(path="tiny"),
        max_steps=20,
        seq_len=64,
        seed=0,
        algorithm=AlgorithmConfig(advantage=advantage),
        environments=[EnvironmentConfig(id="math")],
        sampling=SamplingConfig(),
        evaluation=None,
        checkpoint=CheckpointConfig(),
        weight_sync=WeightSyncConfig(),
    )
    folder.write("run.json", {"orchestrator": config.model_dump(mode="json")})


def reasons(run: Folder, static: StaticFiles, number: int = 4) -> dict[str, Any]:
    asked: Client = client(run.root, static=static)[0]
    found: dict[str, Any] = asked.json(f"/api/runs/{run.id}/rollouts/{number}/reasons", step=3)
    return found


def test_explanation_contains_arithmetic_and_commands(run: Folder, static: StaticFiles) -> None:
    found = reasons(run, static)
    (lines,) = found["samples"]
    assert lines[2] == "  rewards of its group: 1, 0, 0, 0"
    assert lines[4] == "    rloo: 1 - mean of the 3 others 0 -> 1"
    assert lines[5] == "  advantage 1 in the batch; recomputed: equal"
    assert found["why"] is None
    replay = f"rlrun replay {run.root} --step 3"
    assert commands(found) == [f"{replay} --sample 1/0 --no-compute"], "the batches of steps 1 and 2 are gone"


def commands(found: dict[str, Any]) -> list[str]:
    return [one["command"] for one in found["commands"]]


def test_only_possible_commands_are_offered(run: Folder, static: StaticFiles) -> None:
    replay = f"rlrun replay {run.root} --step 3"
    saved = run.paths.checkpoints / "step_00000002.a0001"
    document = {"format_version": 1, "step": 2, "attempt": 1, "created_at": 1.7e9, "files": []}
    run.write(str(saved.relative_to(run.root) / "manifest.json"), document)
    fork = f"rlrun fork {run.root}"
    assert commands(reasons(run, static)) == [f"{replay} --sample 1/0", replay, f"{fork} --manifest run.yaml"]
    run.write("manifest.yaml", "{}")
    assert commands(reasons(run, static))[-1] == fork
    (run.paths.batch(3, 1) / "batch.json").unlink()
    shutil.rmtree(run.paths.batch(3, 1))
    found = reasons(run, static)
    assert commands(found) == [fork]
    assert "no longer on the volume" in found["why"]
    shutil.rmtree(saved)
    assert commands(reasons(run, static)) == []


def test_custom_estimator_is_not_called(run: Folder, static: StaticFiles) -> None:
    configured(run, AdvantageConfig(name="no_such_package.of_anyone:worth"))
    (lines,) = reasons(run, static)["samples"]
    assert lines[-1].endswith("is the run's own estimator: only rlrun replay calls it, not this page")


def test_missing_explanation_is_reported_with_reason(run: Folder, static: StaticFiles) -> None:
    run.write("run.json", {"orchestrator": {"name": SHAPED}})
    (lines,) = reasons(run, static)["samples"]
    assert "run.json cannot be read, so the estimator is unknown" in lines[-1]
    assert SHAPED not in str(lines)
    assert "does not contain this rollout" in reasons(run, static, number=0)["why"]
    run.write("rollouts/step_00000003.a0001/batch.json", "{torn")
    assert "cannot read the batch" in reasons(run, static)["why"]
    (run.paths.batch(3, 1) / "batch.json").unlink()
    assert "no longer on the volume" in reasons(run, static)["why"]
