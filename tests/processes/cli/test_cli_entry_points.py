"""Every program of the package answers `--help` and refuses what it does not know, before it does anything."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from rlrun.runtime import exit_codes
from tests.support.programs import run_program

PROJECT = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
PROGRAMS = sorted(PROJECT["scripts"].items())
CONFIGURED = {"rl", "sft", "trainer", "orchestrator", "inference"}
MODULES = ["rlrun.trainer", "rlrun.orchestrator", "rlrun.inference", "rlrun.evaluate", "rlrun.pod"]
NO_CLUSTER = {"KUBECONFIG": "/nonexistent/config", "PATH": "/usr/bin:/bin", "HOME": "/nonexistent"}


def call(code: list[str], *words: str) -> subprocess.CompletedProcess[str]:
    return run_program([sys.executable, *code, *words], env=NO_CLUSTER)


def program(name: str, target: str) -> list[str]:
    module, _, function = target.partition(":")
    return ["-c", f"import sys; sys.argv[0] = {name!r}; from {module} import {function} as f; sys.exit(f())"]


@pytest.mark.parametrize(("name", "target"), PROGRAMS, ids=[name for name, _ in PROGRAMS])
def test_a_program_helps_and_refuses_an_unknown_option(name: str, target: str) -> None:
    helped = call(program(name, target), "--help")
    assert (helped.returncode, helped.stderr) == (0, ""), helped.stderr
    called = name.replace("kubectl-", "kubectl ")  # as kubectl calls its plugins
    assert helped.stdout.startswith(f"usage: {called}")
    refused = call(program(name, target), "--no-such-option")
    # Where the options are a configuration's fields, those that are missing are told as well.
    assert refused.returncode in (
        (exit_codes.USAGE, exit_codes.CONFIGURATION) if name in CONFIGURED else (exit_codes.USAGE,)
    )
    assert refused.stdout == ""
    assert "Traceback" not in refused.stderr
    assert "--no-such-option" in refused.stderr or "required" in refused.stderr or "usage:" in refused.stderr


@pytest.mark.parametrize("module", MODULES)
def test_a_role_helps_and_refuses_an_unknown_option(module: str) -> None:
    helped = call(["-m", module], "--help")
    assert helped.returncode == 0, helped.stderr
    assert helped.stdout.startswith("usage: ")
    refused = call(["-m", module], "--no-such-option")
    assert refused.returncode in (2, exit_codes.USAGE), refused.stderr
    assert "Traceback" not in refused.stderr
