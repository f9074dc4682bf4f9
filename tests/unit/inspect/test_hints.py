"""Commands in messages work when copied: they contain the run's namespace and no placeholder for a known value."""

from __future__ import annotations

import ast
import re
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from rlrun.inspect.advice import ADVICE
from rlrun.inspect.cluster_reader import run_snapshot
from rlrun.inspect.why import explain_run
from tests.unit.inspect.broken import NOW, condition, run

ROOT = Path(__file__).parents[3]
OF_RUNS = r"rlrun (?:why|logs|status|watch|resume|restart|suspend|set|scale|pull|rollouts|cost|compare|plot) (\S+)"
"""Commands on runs, and the name of their argument."""
NAMESPACED = (
    r"kubectl (?:logs|exec|delete pod|describe pod|describe pvc|describe quota|get events|get localqueues)\b[^`;,]*"
)
HERE = ("{self.folder}", "{root}", "{pulled}", "DIR", "...", "{folder}", "says")
"""Local runs, which have no namespace, and words that are not names."""


@cache
def find_command_texts() -> list[tuple[str, str]]:
    """Return the places and texts of the product that contain a command, with expressions in braces, without documentation."""
    found = []
    for folder in ("operator/rlrun_operator", "workloads/rlrun"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            nodes = list(ast.walk(ast.parse(path.read_text())))
            documentation = {id(node.value) for node in nodes if isinstance(node, ast.Expr) and _is_text(node.value)}
            inner = {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
            for node in nodes:
                if id(node) in documentation or id(node) in inner or not _names_a_command(node):
                    continue
                found.append((f"{path.relative_to(ROOT)}:{node.lineno}", _text(node)))
    return found


def _names_a_command(node: ast.AST) -> bool:
    """Return whether a text contains a command. The check is cheap and saves the slow `ast.unparse` for other texts."""
    parts = node.values if isinstance(node, ast.JoinedStr) else [node]
    return any(_is_text(part) and re.search("rlrun |kubectl ", part.value) for part in parts)


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _text(node: ast.expr) -> str:
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part) for part in node.values)
    if isinstance(node, ast.FormattedValue):
        return "{" + re.sub(r"\s", "", ast.unparse(node.value)) + "}"
    return str(node.value) if isinstance(node, ast.Constant) else ""


def test_hints_of_commands_name_run_and_namespace() -> None:
    lacking = [
        f"{where}: {hint[0]}"
        for where, text in find_command_texts()
        for hint in re.finditer(OF_RUNS, text)
        if not ("argument" in hint[1] or hint[1].startswith(HERE) or "-n " in text[hint.end() :])
        and not re.match(r"(NAME|HOST|WHERE|RUN|RUN_FOLDER)\b", hint[1])
    ]
    assert lacking == []


def test_hints_for_kubectl_name_the_namespace() -> None:
    found = [(where, hint[0]) for where, text in find_command_texts() for hint in re.finditer(NAMESPACED, text)]
    assert len(found) > 8
    assert [one for one in found if "-n " not in one[1] and "argument" not in one[1] and "{pod}" not in one[1]] == []


@pytest.mark.parametrize("reason", sorted(ADVICE))
def test_advice_placeholders_are_filled_with_run_namespace_and_host(reason: str) -> None:
    seen = run_snapshot(run("Running", condition("Progressing", "False", reason, "it waits")), now=NOW)
    told = explain_run(replace(seen, host="big"), NOW)
    hints = [hint for one in told.now for hint in re.findall(r"`([^`]*)`", one.do)]
    assert [hint for hint in hints if re.search(r"\b(NAME|HOST|WHERE|NAMESPACE|ROLE)\b", hint)] == []
    assert [hint for hint in hints if re.match(OF_RUNS, hint) and " -n team" not in hint] == []


def test_folder_name_with_space_is_quoted() -> None:
    seen = replace(run_snapshot(run("Running"), now=NOW), place="folder", where="runs/my run")
    assert seen.argument == "'runs/my run'"
