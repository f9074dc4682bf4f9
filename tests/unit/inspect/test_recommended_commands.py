"""Commands that an output recommends exist with their options and work in the state of the recommendation."""

from __future__ import annotations

import ast
import re
import shlex
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from rlrun.api.run_manifest import take_variation
from rlrun.cli.main import COMMANDS, main
from rlrun.inspect.advice import ADVICE, ON_THIS_MACHINE
from tests.unit.docs.documented_commands import ROOT
from tests.unit.inspect.explained import CASES, Case, told
from tests.unit.inspect.test_folder_commands import Folder

_QUOTED = re.compile(r"`(?:kubectl )?rlrun ([a-z][a-z-]*)(?=[ `])([^`]*)`")
PLACEHOLDER = "X"
FOLDER_CASES = {title: case for title, case in CASES.items() if not isinstance(case.make, str)}


def texts(tree: ast.AST) -> Iterator[str]:
    """Return the texts of a module, with placeholders for formatted values."""
    inside = set[int]()
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            inside |= {id(one) for one in node.values}
            yield "".join(str(one.value) if isinstance(one, ast.Constant) else PLACEHOLDER for one in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inside:
            yield node.value


@cache
def recommended() -> dict[str, set[str]]:
    """Return the commands in backticks with the modules that write them."""
    found: dict[str, set[str]] = {}
    for folder in ("workloads/rlrun", "operator/rlrun_operator"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for text in texts(ast.parse(path.read_text())):
                for command, rest in _QUOTED.findall(text):
                    found.setdefault(f"{command}{rest}", set()).add(str(path.relative_to(ROOT)))
    return found


def test_recommended_commands_are_found() -> None:
    named = {command.split()[0] for command in recommended()}
    assert named >= {"why", "status", "logs", "pull", "resume", "restart", "fork", "track", "convert"}
    assert len(recommended()) > 50


def test_recommended_command_exists_with_its_options(capsys: pytest.CaptureFixture[str]) -> None:
    wrong, helps = [], dict[str, str]()
    for words, modules in recommended().items():
        name, *rest = words.replace("…", "").split()
        if name not in COMMANDS:
            wrong.append((words, sorted(modules)))
            continue
        if name not in helps:
            assert main([name, "--help"]) == 0
            helps[name] = capsys.readouterr().out
        options = [word.partition("=")[0] for word in rest if re.match(r"--?[a-z]", word)]
        wrong += [
            (f"{words}: {one}", sorted(modules))
            for one in options
            if not _has(helps[name], one) and not take_variation([one])[1]
        ]
    assert wrong == []


def _has(text: str, option: str) -> bool:
    return re.search(rf"(?<![\w-]){re.escape(option)}(?![\w-])", text) is not None


@pytest.mark.parametrize("table", [ADVICE, ON_THIS_MACHINE], ids=["cluster", "folder"])
def test_advice_has_commands_only_in_backticks(table: dict[str, object]) -> None:
    loose = [
        reason
        for reason, one in table.items()
        if "rlrun " in re.sub(r"`[^`]*`", "", one.do)  # type: ignore[attr-defined]
    ]
    assert loose == []


@pytest.mark.parametrize("title", FOLDER_CASES)
def test_commands_recommended_by_why_work_in_that_state(
    title: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text((ROOT / "examples/quickstart.yaml").read_text())
    case: Case = FOLDER_CASES[title]
    text = " ".join(told(case, tmp_path / "runs" / "a").split())
    found = [f"{command}{rest}" for command, rest in _QUOTED.findall(text) if rest]
    for words in dict.fromkeys(found):
        command = shlex.split(words)
        dry = ["--dry-run"] if command[0] == "local" else []
        assert main([*command, *dry]) == 0, f"{words}: {capsys.readouterr().err}"


@pytest.mark.parametrize("state", ["Complete", "Failed", "Interrupted"])
def test_commands_recommended_by_status_work_in_that_state(
    state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text((ROOT / "examples/quickstart.yaml").read_text())
    folder = Folder(tmp_path / "runs" / "a")
    folder.train(3)
    folder.record(state=state, time=time.time() - 60)
    for show in ("status", "why"):
        assert main([show, "runs/a"]) == 0
        text = " ".join(capsys.readouterr().out.split())
        for words in [f"{command}{rest}" for command, rest in _QUOTED.findall(text) if rest]:
            command = shlex.split(words)
            dry = ["--dry-run"] if command[0] == "local" else []
            assert main([*command, *dry]) == 0, f"{words}: {capsys.readouterr().err}"
            capsys.readouterr()
