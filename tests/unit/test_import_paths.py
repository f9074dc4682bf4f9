"""A process that a test starts runs the code that the test belongs to, although another checkout may be the one that is installed."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
SET = re.compile(r'"PYTHONPATH"\s*[:,]\s*(?P<value>[^\n]+)')
KEEPS = ("before(", "sys.path", "IMPORT_PATH", "'workloads'", "/workloads:", "pathsep.join(path)")
"""Part of a value that leads to this checkout's packages."""

NOTHING_OF_OURS = {"support/python_path.py", "cluster/native/components.py", "security/test_environment_variables.py"}
"""Files that may name the variable: its reader, a program of the tests alone, and a list of names."""


def replaced(text: str) -> list[str]:
    """Values of PYTHONPATH in a module that leave out where its code is."""
    return [found["value"] for found in SET.finditer(text) if not any(word in found["value"] for word in KEEPS)]


def test_no_test_replaces_the_path_of_the_code_under_test() -> None:
    assert replaced('patch.setenv("PYTHONPATH", str(FOLDER))') == ["str(FOLDER))"]
    assert replaced('environment = {"PYTHONPATH": before(FOLDER)}') == []
    files = [file for file in TESTS.rglob("*.py") if file != Path(__file__)]
    found = {str(file.relative_to(TESTS)): values for file in files if (values := replaced(file.read_text()))}
    assert set(found) == NOTHING_OF_OURS, found
