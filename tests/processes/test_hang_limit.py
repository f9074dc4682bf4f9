"""Time limit of tests: a hanging test fails with the stacks and states of its processes."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tests.support.programs import run_program
from tests.support.python_path import before
from tests.support.waiting import PATIENCE

ROOT = Path(__file__).parents[2]
HANGS = """
import subprocess

def test_hangs():
    subprocess.run(["sleep", "600"])

def test_next_one_runs():
    pass
"""


def test_hanging_test_is_killed_with_report(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(HANGS)
    command = [sys.executable, "-m", "pytest", "-p", "tests.hang_limit", "-p", "no:cacheprovider", "--timeout=1"]
    done = run_program(
        [*command, str(tmp_path)], cwd=tmp_path, env={**os.environ, PATIENCE: "1", "PYTHONPATH": before(ROOT)}
    )
    assert "1 failed, 1 passed" in done.stdout, done.stdout + done.stderr
    assert "sleeping, 0.0 s of CPU: sleep 600" in done.stdout
    assert "Timeout (>1.0s)" in done.stdout
