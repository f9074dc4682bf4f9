"""Families with special loading in vLLM: parameters written without loaders, experts that a CPU packs, and a run's own class."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.programs import run_program, wait_for_exit
from tests.support.vllm_forks import vllm_forks
from tests.trainer.in_vllm import LIMIT


def test_model_without_loaded_values_fails_the_update(
    tmp_path: Path,
) -> None:
    log = tmp_path / "log"
    assert wait_for_exit(vllm_forks().start("tests.engine.losing_model", log=log)) == 0, log.read_text()[-3000:]
    whole, lossy = json.loads(next(line for line in log.read_text().splitlines() if line.startswith("[{")))
    assert set(whole["values"]) == {"loaded.weight", "written.weight", "forgotten.weight"}
    assert all(values == [2.0] * 3 for values in whole["values"].values()), whole
    assert (whole["same memory"], whole["path"]) == (True, "v2"), "recorded graphs read where the old version was"
    assert lossy == {"lost": "1 parameters of vLLM's Model got no values: forgotten.weight"}


def served(kind: str, folder: Path) -> dict[str, Any]:
    """Serve two versions of a small model of a type, and return the differences from the trainer."""
    done = run_program(
        [sys.executable, "-m", "tests.trainer.in_vllm", str(folder), kind], cwd=Path(__file__).parents[2]
    )
    logs = "".join(file.read_text()[-3000:] for file in folder.glob("*.log"))
    found: dict[str, Any] = json.loads((folder / f"{kind}.found").read_text())
    assert "failed" not in found, f"{found}\n{done.stderr[-3000:]}\n{logs}"
    assert max(found["first"], found["second"]) < LIMIT, found
    assert found["moved"] > 1.0
    assert done.returncode == 0
    return found


@pytest.mark.full
def test_second_version_of_gpt_oss_is_served(tmp_path: Path) -> None:
    served("gpt_oss", tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("kind", ["gemma3", "mistral3", "qwen2_5_vl", "qwen2_vl", "qwen3_vl"])
def test_vision_repository_is_served_without_its_encoder(kind: str, tmp_path: Path) -> None:
    assert served(kind, tmp_path)["encoder"] == 0


@pytest.mark.full
def test_own_class_is_served_by_its_own_code(tmp_path: Path) -> None:
    done = run_program([sys.executable, "-m", "tests.engine.own_class", str(tmp_path)], cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["class"] == "TransformersForCausalLM"
    assert max(found["first"], found["second"]) < LIMIT, found
    assert found["moved"] > 0.1, found


@pytest.mark.full
def test_vision_repository_is_served_with_its_encoder(tmp_path: Path) -> None:
    assert served("qwen3_vl+encoder", tmp_path)["encoder"] > 0
