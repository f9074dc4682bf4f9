"""Programs of the package: `--help`, and refusal of unknown options before any work."""

from __future__ import annotations

import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlrun.runtime import exit_codes
from tests.support.forks import Forks

PROJECT = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
PROGRAMS = sorted(PROJECT["scripts"].items())
CONFIGURED = {"rl", "sft", "trainer", "orchestrator", "inference"}
MODULES = ["rlrun.trainer", "rlrun.orchestrator", "rlrun.inference", "rlrun.evaluate", "rlrun.pod"]
IMPORTED = [
    *dict.fromkeys(target.partition(":")[0] for _, target in PROGRAMS),
    *(
        "rlrun.trainer.__main__",
        "rlrun.orchestrator.main",
        "rlrun.inference.__main__",
        "rlrun.evaluate.evaluation_role",
    ),
]
"""Modules that are imported once: the imports of a program use 0.5 to 1 s of CPU time, its own work uses little."""
NO_CLUSTER = {"KUBECONFIG": "/nonexistent/config", "PATH": "/usr/bin:/bin", "HOME": "/nonexistent"}


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    forks = Forks(IMPORTED, {})
    yield forks
    forks.close()


@pytest.mark.parametrize(("name", "target"), PROGRAMS, ids=[name for name, _ in PROGRAMS])
def test_program_prints_help_and_refuses_unknown_option(forks: Forks, name: str, target: str) -> None:
    def call(word: str) -> subprocess.CompletedProcess[str]:
        return forks.call("tests.support.entry_point", name, target, word, environment=NO_CLUSTER)

    helped = call("--help")
    assert (helped.returncode, helped.stderr) == (0, ""), helped.stderr
    called = name.replace("kubectl-", "kubectl ")  # kubectl runs its plugins under this name.
    assert helped.stdout.startswith(f"usage: {called}")
    refused = call("--no-such-option")
    # If the options are the fields of a configuration, the output also lists missing fields.
    assert refused.returncode in (
        (exit_codes.USAGE, exit_codes.CONFIGURATION) if name in CONFIGURED else (exit_codes.USAGE,)
    )
    assert refused.stdout == ""
    assert "Traceback" not in refused.stderr
    assert "--no-such-option" in refused.stderr or "required" in refused.stderr or "usage:" in refused.stderr


@pytest.mark.parametrize("module", MODULES)
def test_role_prints_help_and_refuses_unknown_option(forks: Forks, module: str) -> None:
    helped = forks.call(module, "--help", environment=NO_CLUSTER)
    assert helped.returncode == 0, helped.stderr
    assert helped.stdout.startswith("usage: ")
    refused = forks.call(module, "--no-such-option", environment=NO_CLUSTER)
    assert refused.returncode in (2, exit_codes.USAGE), refused.stderr
    assert "Traceback" not in refused.stderr
