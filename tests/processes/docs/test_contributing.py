"""Diffs on the page for contributors, which must apply to the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.programs import run_program

ROOT = Path(__file__).parents[3]
DIFFS = re.findall(r"```diff\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL)


@pytest.mark.parametrize("diff", DIFFS, ids=lambda diff: re.findall(r"^\+\+\+ b/(\S+)", diff, re.MULTILINE)[0])
def test_diff_of_contributing_page_applies(diff: str) -> None:
    done = run_program(["git", "apply", "--check", "-"], cwd=ROOT, input=diff)
    assert done.returncode == 0, done.stderr


def test_each_example_change_touches_at_most_three_files() -> None:
    assert len(DIFFS) == 4
    for diff in DIFFS:
        assert len(re.findall(r"^\+\+\+ b/", diff, re.MULTILINE)) <= 3
