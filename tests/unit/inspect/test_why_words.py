"""The page of ten broken runs matches the output of `rlrun why`, which names cause and fix."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.unit.inspect.explained import CASES, told

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "why.md"
HEAD = """# Answers of `rlrun why`

<!-- The words below are written by tests/unit/inspect/test_why_words.py with RLRUN_WRITE_GOLDEN=1. -->

Ten runs, each broken on purpose, and the answer of [`rlrun why`](../cli.md): the present state with its causes, the ends of
attempts, and the next commands. The first six runs are folders on one machine, the other four run in a cluster. The web page and
`Run.why()` in [Python](../cli.md#runs-from-python) show the same text. [Troubleshooting](../troubleshooting.md) lists all reasons.
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def page(here: Path) -> str:
    parts = [HEAD]
    for at, (title, case) in enumerate(CASES.items()):
        folder = here / str(at)
        folder.mkdir()
        os.chdir(folder)
        parts.append(f"## {title}\n\n{case.done}\n\n```text\n{told(case, folder / 'runs' / 'a')}\n```\n")
    return "\n".join(parts)


def test_page_of_broken_runs_matches_why_output(here: Path) -> None:
    text = page(here)
    if os.environ.get("RLRUN_WRITE_GOLDEN"):
        PAGE.write_text(text)
    assert PAGE.read_text() == text


@pytest.mark.parametrize("title", CASES)
def test_why_output_names_cause_and_fix(title: str, here: Path) -> None:
    case = CASES[title]
    text = " ".join(told(case, here / "runs" / "a").split())
    assert case.cause in text
    assert case.remedy in text.partition("what to do")[2], "it is among what is to be done"


def test_page_has_ten_cases() -> None:
    assert len(CASES) == 10
