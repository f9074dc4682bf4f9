"""mypy reads the benchmarks, which no other test runs, and reports removed names and arguments there."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
SETTINGS: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mypy"]
UNTYPED_LIBRARIES = {
    "disallow_subclassing_any",
    "disallow_untyped_calls",
    "disallow_untyped_decorators",
    "warn_return_any",
}
"""Checks that fail for uses of untyped libraries, whatever their names and arguments are."""
SHORT_NAMES = {"agent_in_process", "turns"}
"""Modules of benchmarks/tasksets that verifiers loads without their package."""


def test_mypy_reads_all_benchmarks_and_tools() -> None:
    assert {"benchmarks", "tools"} <= {*SETTINGS["packages"]}
    assert "exclude" not in SETTINGS


def test_mypy_checks_names_and_arguments_in_benchmarks() -> None:
    assert SETTINGS["strict"]
    for override in SETTINGS["overrides"]:
        modules = {name.removesuffix(".*") for name in override["module"]}
        ours = {name for name in modules if (ROOT / name.split(".")[0]).is_dir()}
        weaker = override.keys() - {"module"}
        assert not ours or (ours == {"benchmarks"} and weaker == UNTYPED_LIBRARIES), override
        short = {name for name in modules if [*ROOT.glob(f"benchmarks/**/{name}.py")]}
        assert short <= SHORT_NAMES, override


def test_benchmarks_without_type_ignores() -> None:
    files = sorted((ROOT / "benchmarks").rglob("*.py"))
    assert len(files) > 40
    assert [file.name for file in files if "type: ignore" in file.read_text()] == []
