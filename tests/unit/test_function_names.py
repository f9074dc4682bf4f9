"""Function names of the product consist of verb and object (decision 142)."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("operator/rlrun_operator", "workloads/rlrun")
FORBIDDEN = frozenset(
    {"again", "begun", "found", "made", "meant", "noted", "of", "one", "own", "place", "said", "told", "whole", "words"}
)
"""Names with one meaning in each module."""
MOST_ONE_WORD_NAMES = 0.18
"""Maximum share of one-word names among functions and methods."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


def read_modules() -> Iterator[tuple[Path, ast.Module]]:
    for package in PACKAGES:
        for file in sorted((ROOT / package).rglob("*.py")):
            yield file.relative_to(ROOT), ast.parse(file.read_text())


def test_function_has_descriptive_name() -> None:
    found = [
        f"{file}:{node.lineno}: {node.name}"
        for file, module in read_modules()
        for node in ast.walk(module)
        if isinstance(node, Function) and node.name.strip("_") in FORBIDDEN
    ]
    assert found == []


def test_most_functions_are_named_by_verb_and_object() -> None:
    names = [
        node.name.strip("_")
        for _, module in read_modules()
        for node in ast.walk(module)
        if isinstance(node, Function) and not (node.name.startswith("__") and node.name.endswith("__"))
    ]
    assert len(names) > 5_000
    share = sum("_" not in name for name in names) / len(names)
    assert share <= MOST_ONE_WORD_NAMES, f"{share:.3f}"
