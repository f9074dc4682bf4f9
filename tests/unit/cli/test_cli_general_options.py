"""Options that several commands share: each command supports them or refuses them by name."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from rlrun.cli import evaluation, rl, role_commands, sft
from rlrun.cli.command_options import GENERAL_OPTIONS
from rlrun.cli.main import COMMANDS, main
from rlrun.runtime import exit_codes
from tests.unit.docs.documented_commands import ROOT

WORDS = {
    "env": ["list"],
    "completion": ["bash"],
    "rows": ["rows.jsonl"],
    "export": ["runs/x", "--output", "y"],
    "pull": ["x", "model"],
    "put": ["file", "claim"],
    "compare": ["a", "b"],
    "plot": ["a"],
    "cost": [],
    "ui": [],
}
"""Arguments of commands that need other arguments than a manifest."""
MANIFEST = str(ROOT / "examples/quickstart.yaml")
CASES = [(command, option) for command in COMMANDS for option in GENERAL_OPTIONS]


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def help_of(command: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main([command, "--help"]) == exit_codes.OK
    return capsys.readouterr().out


@pytest.mark.parametrize("command", COMMANDS)
def test_help_lists_supported_general_options(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    shown = set(re.findall(r"(?<![\w.-])--[a-z][a-z-]*(?![\w.-])", help_of(command, capsys)))
    if command in ("eval", "synthesize"):  # files (`eval @ FILE`) take the options of `rl`, too
        shown |= {"--resume"} if command == "eval" else set()
        shown |= {"--output-dir"}
    assert {option for option in GENERAL_OPTIONS if option in shown} == {
        option for option, commands in GENERAL_OPTIONS.items() if command in commands
    }


@pytest.mark.parametrize(("command", "option"), [case for case in CASES if case[0] not in GENERAL_OPTIONS[case[1]]])
def test_unsupported_general_option_is_refused_by_name(
    command: str, option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [command, *WORDS.get(command, [MANIFEST]), option]
    assert main(words) == exit_codes.USAGE
    captured = capsys.readouterr()
    assert captured.err.startswith(f"rlrun {command}: {option}: ")
    assert captured.out == ""
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("program", [sft.main, evaluation.eval_main, evaluation.synthesize_main, rl.main])
@pytest.mark.parametrize("option", ["--context", "--namespace", "--kubeconfig", "--set", "--defaults"])
def test_programs_of_their_own_refuse_options_of_clusters(
    program: object, option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["@", MANIFEST] if program is rl.main else [MANIFEST, "--output", "x"]
    words = [MANIFEST] if program is sft.main else words
    code = program([*words, option, "x"])  # type: ignore[operator]
    err = capsys.readouterr().err
    assert (code, f": {option}: " in err, "fields of spec are options" in err) == (
        exit_codes.USAGE, True, option == "--set"
    )  # fmt: skip


ROLE = """{"name": "x", "model": {"path": "m"}, "output_dir": "out", "max_steps": 3, "seq_len": 64}"""
TOML = """max_steps = 3
[model]
name = "org/model"
[orchestrator]
batch_size = 8
rollouts_per_example = 4
[[orchestrator.env]]
id = "reverse-text"
"""


@pytest.mark.parametrize(
    ("words", "fields"),
    [
        ("local {run} --max-steps 7", {"trainer": {"name": "quickstart", "max_steps": 7}}),
        ("local {run} --output-dir other", {"trainer": {"output_dir": "{here}/other"}}),
        ("sft {sft}", {"trainer": {"name": "sft", "task": "SFT"}}),
        ("sft @ {sft} --max-steps 7", {"trainer": {"task": "SFT", "max_steps": 7}}),
        ("rl @ run.toml", {"trainer": {"max_steps": 3}}),
        ("rl @ run.toml --output-dir other", {"trainer": {"output_dir": "other"}}),
        ("eval {run} --max-tasks 3", {"name": "quickstart", "numTasks": 3, "output": "{here}/evaluations/quickstart"}),
        ("eval {run} --temperature 0", {"sampling": {"temperature": 0}}),
        (
            "eval --model.name org/m --environments.0.id reverse-text --output-dir other",
            {"trainer": {"output_dir": "other"}},
        ),
        ("eval {run} --client.base-url http://x/v1 --model.name m", {"model": {"name": "m"}}),
        ("synthesize {run} --base --output d.jsonl", {"split": "train", "numTasks": "all"}),
        ("synthesize {run} --output d.jsonl --client.base-url http://x/v1 --model.name m", {"model": {"name": "m"}}),
        ("trainer @ role.json", {"max_steps": 3, "output_dir": "{here}/out"}),
        ("orchestrator @ run.toml", {"max_steps": 3, "batch_size": 8}),
        ("inference @ role.json", {"output_dir": "{here}/out"}),
        ("tiny-model made --layers 2", {"layers": 2}),
    ],
)
def test_dry_run_prints_configuration_without_start(
    words: str, fields: dict[str, object], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("role.json").write_text(ROLE)
    Path("run.toml").write_text(TOML)
    given = words.format(run=MANIFEST, sft=ROOT / "examples/sft.yaml").split()
    assert main([*given, "--dry-run"]) == exit_codes.OK
    found = json.loads(capsys.readouterr().out)
    expected = json.loads(json.dumps(fields).replace("{here}", str(tmp_path)))
    for name, value in expected.items():
        assert found[name] == (found[name] | value if isinstance(value, dict) else value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["role.json", "run.toml"]


def test_dry_run_is_refused_with_value_or_bench(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["local", MANIFEST, "--dry-run=false"], ["eval", MANIFEST, "--dry-run=true"]):
        assert main(words) == exit_codes.USAGE
        assert "--dry-run" in capsys.readouterr().err
    assert main(["sft", str(ROOT / "examples/sft.yaml"), "--bench", "--dry-run"]) == exit_codes.USAGE
    assert "--dry-run: this option cannot be combined with --bench" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--resume", "--output-dir"])
def test_eval_with_manifest_refuses_run_options(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", MANIFEST, option, "--dry-run"]) == exit_codes.USAGE
    assert f"eval: unknown option {option}" in capsys.readouterr().err


def test_dry_run_commands_are_all_tested() -> None:
    changes = {"suspend", "resume", "restart", "scale", "set"}  # tests/unit/inspect/test_cluster_commands.py
    tried = {"local", "sft", "rl", "eval", "synthesize", "tiny-model", *role_commands.MODELS}
    assert {*GENERAL_OPTIONS["--dry-run"]} == tried | changes
