"""First run on a cluster with GPUs, as the installation page prints it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from rlrun.api.resource import RLRunSpec

ROOT = Path(__file__).parents[3]
FIRST = "examples/gpu-check.yaml"
MOST = 5


def first_commands() -> list[str]:
    """Return the commands of the first block of the section about a real cluster."""
    section = (ROOT / "docs/install.md").read_text().partition("## A real cluster")[2]
    block = re.search(r"```\n(.*?)```", section, re.DOTALL)
    assert block is not None
    return block[1].replace("\\\n", " ").strip().splitlines()


def test_installation_needs_at_most_five_commands() -> None:
    commands = first_commands()
    assert len(commands) <= MOST
    assert commands[0].startswith("make images REGISTRY="), "images for GPUs"
    assert "ACCELERATOR=cpu" not in " ".join(commands)
    assert commands[-1].endswith(f"apply -f {FIRST}")
    assert "--values images.yaml" in " ".join(commands)


def test_first_run_uses_one_gpu_per_role_without_hub() -> None:
    spec = RLRunSpec.model_validate(yaml.safe_load((ROOT / FIRST).read_text())["spec"])
    assert (spec.trainer.gpus_per_replica, spec.trainer.replicas) == (1, 1)
    assert (spec.inference.gpus_per_replica, spec.inference.replicas) == (1, 1)
    assert spec.model.tiny is not None
    assert spec.model.tiny.warmup_environment is None, "the check needs seconds, not a learned task"
    assert (spec.model.dtype, spec.max_steps) == ("bfloat16", 5)
    assert [environment.id for environment in spec.environments] == ["reverse-text"]
    text = (ROOT / FIRST).read_text()
    assert not {"env", "envFrom", "tracking", "evaluation"} & set(yaml.safe_load(text)["spec"])
    assert "secret" not in text.partition("apiVersion:")[2].lower()


@pytest.mark.parametrize("page", ["docs/install.md", "docs/overview.md", "charts/rlrun-operator/templates/NOTES.txt"])
def test_administrator_page_names_gpu_check(page: str) -> None:
    assert FIRST.rpartition("/")[2] in (ROOT / page).read_text()
