"""Heavy imports of a process before any work: each start and restart waits for them."""

from __future__ import annotations

import json
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
    "rlrun.inference.engine_server": {"aiohttp", "pydantic"},
    "rlrun.environments.process.worker": set(),
    "rlrun.tracking.sink": {"pydantic"},
    "rlrun.mirror.copy_process": {"pydantic"},
    "rlrun.local.local_command": {"rich", "plotext", "pydantic"},
    "rlrun.cli.rl": {"pydantic"},
    "rlrun.ui.app": {"fastapi", "pydantic"},
    "rlrun_operator.main": {"pydantic"},
}
"""Packages by the first module of a process. A process imports other packages only when it needs them."""


IMPORTED_FIRST = "pydantic, rlrun.config.models.run_config"
"""Modules that all processes with pydantic import, and that take most of the time."""
DRIVER = """
import json, os, sys
with_pydantic, others = json.loads(sys.argv[1])
def loaded_by(module):
    reading, writing = os.pipe()
    if os.fork() == 0:
        __import__(module)
        os.write(writing, " ".join({name.partition(".")[0] for name in sys.modules}).encode())
        sys.stdout.flush()
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as file:
        found = file.read().split()
    assert os.wait()[1] == 0, module
    return found
found = {module: loaded_by(module) for module in others}
import IMPORTED_FIRST
found |= {module: loaded_by(module) for module in with_pydantic}
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def loaded() -> dict[str, list[str]]:
    """Loaded packages of each process, forked from one process with the shared imports."""
    with_pydantic = [module for module, needed in NEEDED.items() if "pydantic" in needed]
    others = [module for module in NEEDED if module not in with_pydantic]
    words = json.dumps([with_pydantic, others])
    done = run_program([sys.executable, "-c", DRIVER.replace("IMPORTED_FIRST", IMPORTED_FIRST), words], check=True)
    found: dict[str, list[str]] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("module", NEEDED)
def test_process_starts_with_only_needed_packages(module: str, loaded: dict[str, list[str]]) -> None:
    assert HEAVY & set(loaded[module]) == NEEDED[module]
