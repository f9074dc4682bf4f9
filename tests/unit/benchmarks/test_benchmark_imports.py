"""Imports and folders of the benchmarks, which no other test runs, exist in this repository."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SIMULATION = ROOT / "tests" / "support" / "orchestrator" / "simulation"
PLACES = (ROOT, ROOT / "workloads", ROOT / "operator", SIMULATION, ROOT / "benchmarks" / "tasksets")
OURS = ("rlrun", "rlrun_operator", "benchmarks", "tests", "tools", "orch_")
BENCHMARKS = sorted((ROOT / "benchmarks").rglob("*.py"))


def file_of(module: str) -> Path | None:
    """Return the file of a module of this repository, or the folder of a package without `__init__`."""
    for place in PLACES:
        path = place.joinpath(*module.split("."))
        for found in (path.with_suffix(".py"), path / "__init__.py", path):
            if found.exists():
                return found
    return None


@cache
def names_of(file: Path) -> frozenset[str]:
    """Return the names that a module defines after its import."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
    return frozenset(found)


def find_missing_imports(tree: ast.Module) -> Iterator[str]:
    """Return the imports of this repository that cannot be resolved."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (a.name for a in node.names if a.name.startswith(OURS) and file_of(a.name) is None)
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.startswith(OURS):
            file = file_of(node.module)
            if file is None:
                yield node.module
                continue
            known = names_of(file) if file.is_file() else frozenset[str]()
            for alias in node.names:
                if alias.name not in known and file_of(f"{node.module}.{alias.name}") is None:
                    yield f"{node.module}.{alias.name}"


def folders(tree: ast.Module) -> Iterator[str]:
    """Return the paths below the repository that are joined from texts with `/` and start with a folder of tests."""
    for node in ast.walk(tree):
        parts: list[str] = []
        while isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div) and isinstance(node.right, ast.Constant):
            parts.insert(0, str(node.right.value))
            node = node.left
        if parts and parts[0].partition("/")[0] == "tests":
            yield "/".join(parts)


def test_benchmarks_are_found() -> None:
    assert len(BENCHMARKS) > 40
    assert {"benchmarks/async_vs_sync.py", "benchmarks/gpu/steps.py"} <= {str(p.relative_to(ROOT)) for p in BENCHMARKS}


@pytest.mark.parametrize("file", BENCHMARKS, ids=lambda file: str(file.relative_to(ROOT / "benchmarks")))
def test_benchmark_imports_and_folders_exist(file: Path) -> None:
    tree = ast.parse(file.read_text())
    assert not [*find_missing_imports(tree)]
    assert all((ROOT / folder).exists() for folder in folders(tree)), [*folders(tree)]


def test_missing_imports_and_folders_are_detected() -> None:
    text = """
import orch_gone
from rlrun.fit.trainer_memory import trainer_needs, trainer_wants
from rlrun.fit import layout
from orch_simulation import simulate
sys.path.insert(0, str(ROOT / "tests" / "unit" / "orchestrator" / "simulation"))
"""
    tree = ast.parse(text)
    assert [*find_missing_imports(tree)] == ["orch_gone", "rlrun.fit.trainer_memory.trainer_wants"]
    assert "tests/unit/orchestrator/simulation" in [*folders(tree)]
