"""Hybrid models on two ranks in each activation mode: losses and gradients of one rank."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlrun.local.preflight import free_port
from tests.support.programs import run_program
from tests.trainer import architectures
from tests.trainer.hybrids import MODES

pytestmark = pytest.mark.full
LIMIT = 1e-5
KINDS = ("qwen3_5_text", "nemotron_h", "lfm2")


def computed(folder: Path, source: Path, ranks: int) -> dict[str, Any]:
    file = folder / f"{ranks}.json"
    done = run_program(
        [sys.executable, "-m", "tests.trainer.hybrids", str(file), str(ranks), str(free_port()), str(source)]
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return dict(json.loads(file.read_text()))


def largest_error(found: dict[str, list[float]], expected: dict[str, list[float]]) -> float:
    """Return the largest difference of a gradient as a share of its norm, and of the largest norm for gradients near 0."""
    assert found.keys() == expected.keys()
    norms = {name: float(np.linalg.norm(values)) for name, values in expected.items()}
    least = 1e-3 * max(norms.values())
    return max(
        float(np.linalg.norm(np.subtract(found[name], values))) / max(norms[name], least)
        for name, values in expected.items()
    )


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_have_the_gradients_of_one_in_each_activation_mode(kind: str, tmp_path: Path) -> None:
    source = tmp_path / "source"
    architectures.save_published(architectures.whole_model(kind), source, windows=False)
    expected = computed(tmp_path, source, 1)["none"]
    found = computed(tmp_path, source, 2)
    for mode in MODES:
        assert found[mode]["loss"] == pytest.approx(expected["loss"], rel=1e-6)
        assert largest_error(found[mode]["gradients"], expected["gradients"]) <= LIMIT, mode
