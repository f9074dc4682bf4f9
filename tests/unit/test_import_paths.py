"""Processes that tests start run the code of the tests' checkout, even if another checkout is installed."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
SET = re.compile(r'"PYTHONPATH"\s*[:,]\s*(?P<value>[^\n]+)')
KEEPS = ("before(", "sys.path", "IMPORT_PATH", "'workloads'", "/workloads:", "pathsep.join(path)")
"""Part of a value that leads to this checkout's packages."""

NOTHING_OF_OURS = {
    "support/python_path.py",
    "cluster/native/components.py",
    "security/test_environment_variables.py",
    "e2e/cluster/model_stories.py",
}
"""Files that may name the variable: its reader, a program used only by tests, a list of names, and a variable of pods."""


def replaced(text: str) -> list[str]:
    """Return the PYTHONPATH values of a module that omit the folder of its code."""
    return [found["value"] for found in SET.finditer(text) if not any(word in found["value"] for word in KEEPS)]


def test_tests_keep_code_path_in_pythonpath() -> None:
    assert replaced('patch.setenv("PYTHONPATH", str(FOLDER))') == ["str(FOLDER))"]
    assert replaced('environment = {"PYTHONPATH": before(FOLDER)}') == []
    files = [file for file in TESTS.rglob("*.py") if file != Path(__file__)]
    found = {str(file.relative_to(TESTS)): values for file in files if (values := replaced(file.read_text()))}
    assert set(found) == NOTHING_OF_OURS, found
