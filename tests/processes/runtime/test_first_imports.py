"""Heavy libraries that a process has before it does anything: each start and restart waits for them."""

from __future__ import annotations

import sys

import pytest

from tests.support.programs import run_program

HEAVY = frozenset(
    {"torch", "transformers", "vllm", "verifiers", "numpy", "pandas", "scipy", "sklearn", "fastapi", "aiohttp", "kopf", "kubernetes"}
    | {"rich", "plotext", "prometheus_client", "huggingface_hub", "tokenizers", "datasets", "wandb", "mlflow", "jinja2", "requests"}
    | {"pydantic"}
)  # fmt: skip
NEEDED = {
    "rlrun.trainer.ranks.torchrun": {"pydantic"},
    "rlrun.trainer.__main__": {"pydantic"},
    "rlrun.orchestrator.main": {"aiohttp", "numpy", "prometheus_client", "pydantic"},
    "rlrun.inference.server": {"aiohttp", "pydantic"},
    "rlrun.environments.process.worker": set(),
    "rlrun.tracking.sink": {"pydantic"},
    "rlrun.mirror.main": {"pydantic"},
    "rlrun.local.main": {"rich", "plotext", "pydantic"},
    "rlrun.cli.rl": {"pydantic"},
    "rlrun.ui.app": {"fastapi", "pydantic"},
    "rlrun_operator.main": {"pydantic"},
}
"""By the module that a process begins with. What else a process needs it imports when it knows that it does."""


@pytest.mark.parametrize("module", NEEDED)
def test_a_process_begins_with_no_more_than_it_needs(module: str) -> None:
    code = f"import {module}, sys; print(*{{name.partition('.')[0] for name in sys.modules}})"
    loaded = run_program([sys.executable, "-c", code], check=True).stdout.split()
    assert HEAVY & set(loaded) == NEEDED[module]
