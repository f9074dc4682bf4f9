"""`rlrun`: subcommands, exit codes and fast start."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rlrun.cli.main import COMMANDS, main
from tests.support.programs import run_program

MANIFEST = """\
apiVersion: rlrun.io/v1alpha1
kind: RLRun
metadata: {name: quick}
spec:
  model: {tiny: {}}
  maxSteps: 10
  seqLen: 512
  environments:
  - id: reverse-text
    args: {length: 5}
"""


@pytest.fixture
def manifest(tmp_path: Path) -> Any:
    def write(old: str = "", new: str = "") -> str:
        file = tmp_path / "run.yaml"
        file.write_text(MANIFEST.replace(old, new) if old else MANIFEST)
        return str(file)

    return write


def test_validate_summarizes_the_run(manifest: Any, capsys: pytest.CaptureFixture[str]) -> None:
    file = manifest()
    assert main(["validate", file]) == 0
    assert capsys.readouterr().out == (
        f"{file}: valid: RLRun quick, a tiny model, 10 steps of 64 rollouts (640 in all), versions v0 to v10; "
        "reverse-text (groups of 8)\n"
    )


def test_validate_reports_all_problems_of_all_files(manifest: Any, capsys: pytest.CaptureFixture[str]) -> None:
    file = manifest("10", "0")
    assert main(["validate", file, "none.yaml"]) == 78
    assert capsys.readouterr().err.splitlines() == [
        f"{file}:6: spec.maxSteps: got 0, expected a whole number from 1 to 10000000",
        "none.yaml: no such file",
    ]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "reverse-text",
            "revrse-text",
            ":9: spec.environments[0].id: unknown environment 'revrse-text' (did you mean rever",
        ),
        (
            "length: 5",
            "lenght: 5",
            ":10: spec.environments[0].args: environment 'reverse-text': no argument 'lenght' (did",
        ),
        ("length: 5", "length: long", ":10: spec.environments[0].args: environment 'reverse-text': argument 'length'"),
    ],
)
def test_validate_checks_environments(
    manifest: Any, capsys: pytest.CaptureFixture[str], old: str, new: str, message: str
) -> None:
    assert main(["validate", manifest(old, new)]) == 78
    assert message in capsys.readouterr().err


def test_environment_of_image_gets_only_a_note(manifest: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", manifest("reverse-text", "not_installed_here.env:make")]) == 0
    assert "note: spec.environments[0].id is not checked on this machine" in capsys.readouterr().out


def test_render_prints_configuration_of_each_role(manifest: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["render", manifest(), "--output-dir", "/data/quick"]) == 0
    document = json.loads(capsys.readouterr().out)
    for role in ("trainer", "inference", "orchestrator"):
        assert (document[role]["output_dir"], document[role]["max_steps"]) == ("/data/quick", 10)
    algorithm = document["trainer"]["algorithm"]
    assert (algorithm["preset"], algorithm["loss"]["name"], algorithm["aggregation"]) == ("aipo", "aipo", "token_mean")
    assert main(["render", manifest("10", "x")]) == 78


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["valdate"], "rlrun: unknown command 'valdate' (did you mean validate?)"),
        (
            ["zzz"],
            f"rlrun: unknown command 'zzz'; known: {', '.join(COMMANDS)}",
        ),
        (["render", "a.yaml", "--outptu-dir", "x"], "unknown option --outptu-dir (did you mean --output-dir?)"),
        (["render", "a.yaml", "b.yaml"], "unknown argument b.yaml"),
        (["render", "a.yaml", "--output", "x"], "unknown option --output (did you mean --output-dir?)"),
        (["local", "--hlep"], "rlrun local"),
        (["render"], "the following arguments are required: FILE"),
        (["tiny-model", "--layers", "2"], "write the folder first"),
        (["tiny-model", "new", "--layrs", "2"], "--layrs: unknown option (did you mean --layers?)"),
        (["tiny-model", "new", "--layers", "99"], "--layers: got 99, expected a whole number from 1 to 32"),
    ],
)
def test_wrong_command_line_exits_with_64(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 64
    assert message in capsys.readouterr().err


def test_tiny_model_does_not_overwrite_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").touch()
    assert main(["tiny-model", str(tmp_path)]) == 64
    assert "is not empty; choose a new folder" in capsys.readouterr().err
    assert main(["tiny-model", str(tmp_path / "config.json")]) == 64


def test_help_and_version_succeed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in COMMANDS)
    assert main([]) == 64
    assert main(["version"]) == main(["--version"]) == 0
    assert "rlrun.io/v1alpha1" in capsys.readouterr().out
    for name in ("validate", "render", "version", "tiny-model"):
        assert main([name, "--help"]) == 0


def test_cli_imports_no_heavy_modules(manifest: Any) -> None:
    commands = [["--help"], ["tiny-model", "--help"], ["render", manifest()], ["validate", manifest()]]
    code = (
        "import json, sys; from rlrun.cli.main import main\n"
        "for words in json.loads(sys.argv[1]):\n"
        "    code = main(words)\n"
        "    heavy = {'torch', 'vllm', 'transformers', 'numpy', 'verifiers', 'aiohttp'} & set(sys.modules)\n"
        "    if heavy or code: sys.exit(f'{words}: code {code}, imported: {heavy}')"
    )
    done = run_program([sys.executable, "-c", code, json.dumps(commands)])
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("program", ["rlrun.cli.main", "rlrun.cli.rl"])
def test_closed_pipe_causes_no_traceback(program: str) -> None:
    words = ["tiny-model", "--help"] if program == "rlrun.cli.main" else ["--help"]
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as stdout:
        done = subprocess.run(
            [sys.executable, "-m", program, *words], stdout=stdout, stderr=subprocess.PIPE, text=True, check=False
        )
    assert (done.returncode, done.stderr) == (141, "")
