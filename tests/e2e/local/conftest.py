"""Fixtures: whole runs on real parts (torchrun ranks, vLLM and the command line)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlrun.config.models.language_models import TinyModelConfig
from rlrun.trainer.modeling.tiny_model import make_tiny_model
from tests.e2e.local.local_run import SHARED_STEPS, LocalRun, processes_of, quickstart, small_quickstart


@pytest.fixture(scope="session")
def new_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., LocalRun]]:
    """Return a function that creates runs from manifests; remaining processes fail the test session."""
    made: list[LocalRun] = []

    def make(document: dict[str, Any], folder: Path | None = None) -> LocalRun:
        where = tmp_path_factory.mktemp("run")
        manifest = where / "run.yaml"
        manifest.write_text(yaml.safe_dump(document))
        run = LocalRun(manifest, folder or where / "out")
        made.append(run)
        return run

    yield make
    for run in made:
        run.stop()
        left = processes_of(run.folder)
        assert left == [], f"still running: {left}"


@pytest.fixture(scope="session")
def learned(new_run: Callable[..., LocalRun]) -> LocalRun:
    """The quickstart with a small model, run once for all tests that check its learning or replay it."""
    run = new_run(
        small_quickstart(
            maxSteps=SHARED_STEPS,
            evaluation={"interval": SHARED_STEPS // 2},
            checkpoint={"interval": SHARED_STEPS // 2},
            orchestrator={"recordRollouts": True},
        )
    )
    run.start()
    run.wait_until(lambda: bool(run.steps()), "a step")
    run.note_listeners()
    assert run.wait() == 0, f"{run.output}\n{run.tails()}"
    return run


@pytest.fixture(scope="session")
def quickstart_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model of the quickstart and of the adapter example."""
    folder = tmp_path_factory.mktemp("quickstart") / "model"
    make_tiny_model(folder, TinyModelConfig.model_validate(quickstart()["spec"]["model"]["tiny"]))
    return folder
