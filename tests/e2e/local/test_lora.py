"""Run that trains adapters: it learns, and its weight updates and checkpoints are small."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from rlrun.protocol.files.paths import RunPaths
from tests.e2e.local.local_run import LocalRun, example, mean

STEPS = 48
GAIN = 0.03
"""Three standard errors of the compared means; the whole example gains five times as much."""

pytestmark = pytest.mark.full


def test_lora_example_learns_with_small_artifacts(new_run: Callable[..., LocalRun], quickstart_model: Path) -> None:
    model = quickstart_model
    options = {"maxSteps": STEPS, "evaluation": None, "checkpoint": {"interval": STEPS}}
    run = new_run(example("lora", model_folder=model, **options))
    run.run()
    lines, rewards = run.steps(), run.rewards()
    assert lines[0]["off_policy/max"] == 0
    assert lines[0]["mismatch_kl"] <= 1e-3
    assert max(line["off_policy/max"] for line in lines) >= 1
    assert mean(rewards[-8:]) >= mean(rewards[:8]) + GAIN, rewards

    paths = RunPaths(run.folder)
    sizes = [
        sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        for folder in (model, paths.versions_on_disk()[-1].path, paths.checkpoints_on_disk()[-1].path / "trainer")
    ]
    assert sizes[1] < sizes[0] / 4, "a version is the adapter"
    assert sizes[2] < sizes[0], "a checkpoint is the adapter, and two moments of it"
    trained = [span for rollout in run.traces() for turn in rollout["versions"] for span in turn]
    assert {span["version"] for span in trained} <= set(range(STEPS))
    assert all(len(turn) <= 1 for rollout in run.traces() for turn in rollout["versions"]), "one answer, one version"
    assert "the trained adapter (PEFT and vLLM load it onto the model)" in run.output
