"""Modules that users import: environments, custom code and scripts name them, so a release keeps their paths."""

from __future__ import annotations

import importlib

import pytest

PUBLIC = {
    "rlrun": ("Run", "RunError", "ManifestError", "RunFailedError", "WaitTimeoutError"),
    "rlrun.environments": ("AgentEnvironment", "Episode", "Score", "Task"),
    "rlrun.environments.protocol": ("Episode", "Score", "SingleTurnEnvironment", "Split", "Task"),
    "rlrun.environments.splits": ("GeneratedTasks",),
    "rlrun.runs.blocks": (
        "Checkpoint",
        "Environment",
        "Model",
        "Optimizer",
        "Orchestrator",
        "Sampling",
        "TinyModel",
        "Trainer",
    ),
    "rlrun.advantages": ("estimate",),
}
"""Names that pages of a release have shown with their module."""


@pytest.mark.parametrize("module", PUBLIC)
def test_public_module_keeps_its_path_and_names(module: str) -> None:
    found = importlib.import_module(module)
    assert [name for name in PUBLIC[module] if not hasattr(found, name)] == []
