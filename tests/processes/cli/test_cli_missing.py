"""Commands with missing packages: one line with the command that installs them."""

from __future__ import annotations

import json
import sys
import tomllib
from pathlib import Path

import pytest

from rlrun.runtime import extras
from rlrun.runtime.extras import install_extras
from tests.support.programs import run_program

PATH = "/usr/bin:/bin"
ROOT = Path(__file__).parents[3]
SCRIPTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
MODULES = {
    "cli": ["rich", "plotext"],
    "engine": ["vllm"],
    "trainer": ["torch", "transformers", "safetensors", "numpy", "aiohttp", "prometheus_client"],
    "orchestrator": ["msgspec", "jinja2", "pyarrow", "verifiers", "math_verify", "aiohttp", "numpy", "transformers"],
    "operator": ["kopf", "kubernetes", "aiohttp", "prometheus_client"],
}
MODULES["all"] = sorted({module for modules in MODULES.values() for module in modules})
COMMANDS = [
    "rlrun --help", "rlrun version", "rlrun crd", "rlrun charts", "rlrun init --list", "rlrun init -o -",
    "rlrun validate {run}", "rlrun render {run}", "rlrun local {run} --output-dir {tmp}/local",
    "rlrun eval {run} --output {tmp}/eval --max-tasks 1 --environment-ids none", "rlrun synthesize {run} --output {tmp}/x.txt",
    "rlrun export {tmp}/none --output {tmp}/out", "rlrun tiny-model {tmp}/tiny",
    "rl --help", "rl @ {tmp}/none.toml", "sft {tmp}/none.yaml", "eval {tmp}/none.yaml", "synthesize {tmp}/none.yaml --output {tmp}/x.txt",
    "trainer @ {tmp}/none.json", "orchestrator @ {tmp}/none.json", "inference @ {tmp}/none.json", "trainer --help",
    "rlrun-operator", "rlrun-pod --help",
]  # fmt: skip
LOCAL = "rlrun local {run} --output-dir {tmp}/local"
ALONE = [
    ("cli", LOCAL), ("engine", LOCAL), ("trainer", LOCAL), ("orchestrator", LOCAL), ("orchestrator", "eval {tmp}/none.yaml"),
    ("trainer", "rlrun export {tmp}/none --output {tmp}/out"), ("operator", "rlrun-operator"),
]  # fmt: skip
DRIVER = """
import importlib, json, os, sys, tempfile, traceback
import rlrun.cli.main, rlrun.local.judge
scripts, cases = json.load(sys.stdin)
told = []
for blocked, words in cases:
    with tempfile.TemporaryFile() as out:
        child = os.fork()
        if child == 0:
            os.dup2(out.fileno(), 1), os.dup2(out.fileno(), 2)
            sys.modules.update(dict.fromkeys(blocked))
            sys.argv = words
            module, _, function = scripts[words[0]].partition(":")
            try:
                code = getattr(importlib.import_module(module), function)() or 0
            except SystemExit as end:
                code = end.code or 0
            except BaseException:
                traceback.print_exc()
                code = 99
            sys.stdout.flush(), sys.stderr.flush()
            os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        out.seek(0)
        told.append([code, out.read().decode()])
json.dump(told, sys.stdout)
"""


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], tuple[int, str]]:
    """Exit code and output of each command without each extra's modules: (extra, command) -> both."""
    folder = tmp_path_factory.mktemp("missing")
    (folder / "file").touch()
    values = {"run": ROOT / "examples/quickstart.yaml", "tmp": folder}
    cases = [("all", command) for command in COMMANDS] + ALONE
    given = [(MODULES[extra], command.format(**values).split()) for extra, command in cases]
    variables = {"PATH": PATH, "HOME": str(folder), "PYTHONPATH": ":".join(sys.path)}
    asked = json.dumps([SCRIPTS, given])
    done = run_program([sys.executable, "-c", DRIVER], input=asked, check=True, cwd=folder, env=variables)
    return dict(zip(cases, map(tuple, json.loads(done.stdout)), strict=True))


@pytest.fixture(autouse=True)
def _path_of_the_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", PATH)


def shorten_command(command: str) -> str:
    return command.split(" {")[0]


def test_missing_packages_cause_no_traceback(told: dict[tuple[str, str], tuple[int, str]]) -> None:
    broken = {case: output for case, (_, output) in told.items() if "Traceback" in output or "No module" in output}
    assert broken == {}


def test_base_installation_runs_commands_without_extras(told: dict[tuple[str, str], tuple[int, str]]) -> None:
    works = {shorten_command(command) for (extra, command), (code, _) in told.items() if extra == "all" and code == 0}
    assert works == {
        "rlrun --help", "rlrun version", "rlrun crd", "rlrun charts", "rlrun init --list", "rlrun init -o -",
        "rlrun validate", "rlrun render", "trainer --help", "rlrun-pod --help",
    }  # fmt: skip
    for command in COMMANDS:
        if (
            command.split()[0] not in ("trainer", "orchestrator", "inference", "rlrun-operator")
            and shorten_command(command) not in works
        ):
            code, output = told["all", command]
            assert (code, output.endswith(f" not installed; run: {install_extras(extras.LOCAL)}\n")) == (
                extras.EXIT_CODE,
                True,
            ), output


@pytest.mark.parametrize(("extra", "command"), ALONE)
def test_missing_extra_is_reported_with_install_command(
    told: dict[tuple[str, str], tuple[int, str]], extra: str, command: str
) -> None:
    commands = {"operator": install_extras(extras.OPERATOR), "engine": extras.install_cpu_engine()}
    expected = commands.get(extra, install_extras(extras.LOCAL))
    code, output = told[extra, command]
    assert (code, output.count("\n")) == (2 if extra == "operator" else extras.EXIT_CODE, 1), output
    assert output.endswith(f" not installed; run: {expected}\n")
