"""Run of a model class of the user's package (`model.class`), trained and served by the real programs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.e2e.local.local_run import LocalRun, small_quickstart
from tests.support.own_models import path_of, write_model

pytestmark = pytest.mark.full


def test_own_class_is_trained_and_served(new_run: Callable[..., LocalRun], tmp_path: Path) -> None:
    source = write_model(tmp_path / "source", max_position_embeddings=2048)
    document = small_quickstart(maxSteps=3, evaluation={"interval": 100}, checkpoint={"interval": 3})
    document["spec"]["model"] = {"path": str(source), "dtype": "float32", "class": path_of("GatedForCausalLM")}
    document["spec"]["algorithm"] |= {"filters": {"zeroVariance": False}, "maxAsyncLevel": 0}
    run = new_run(document)
    run.run()
    versions = sorted((run.folder / "weights").glob("v*"))
    assert json.loads((versions[-1] / "config.json").read_text())["architectures"] == ["GatedForCausalLM"]
    gate = "model.layers.1.gate.weight"
    first, last = (load_file(next(folder.glob("*.safetensors")))[gate] for folder in (source, versions[-1]))
    assert not first.equal(last)
    # A synchronous run: each batch of a version has only the rounding difference of two implementations.
    assert len(run.steps()) == 3
    assert max(step["mismatch_kl"] for step in run.steps()) < 1e-6
