"""The documented table of broken runs and the plugin manifest match the commands."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlrun.cli.completion import ON_RUNS
from rlrun.inspect.cluster_reader import run_snapshot
from rlrun.inspect.screen import explanation_text
from rlrun.inspect.why import explain_run
from tests.unit.inspect.broken import BROKEN, NOW

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "cli.md").read_text()
COMMANDS = PAGE.partition("\n## Any step again, and forks\n")[0]
"""Section of the page about the commands that inspect runs."""
TABLE = [
    [cell.strip() for cell in line.strip("|").split(" | ")] for line in COMMANDS.splitlines() if line.startswith("| ")
]
ROWS = [row for row in TABLE if row[0] in BROKEN]


def test_documented_table_covers_all_broken_runs() -> None:
    assert {row[0] for row in ROWS} == BROKEN.keys() - {"suspended"}
    assert len(TABLE) == len(ROWS) + 1, "a row of a run that is not tested"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_documented_row_matches_why_output(row: list[str]) -> None:
    _, named, advised = row
    text = " ".join(explanation_text(explain_run(run_snapshot(BROKEN[row[0]][0], now=NOW), NOW), NOW).split())
    assert named.strip("`") in text
    assert advised in text


def test_page_names_every_run_command() -> None:
    assert [name for name in ON_RUNS if f"rlrun {name}" not in PAGE] == []


def test_krew_manifest_names_existing_script() -> None:
    manifest = (ROOT / ".krew.yaml").read_text()
    script = ROOT / "tools" / "krew" / "kubectl-rlrun"
    assert "bin: kubectl-rlrun" in manifest
    assert script.stat().st_mode & 0o111
    assert "-m rlrun.cli.kubectl_plugin" in script.read_text()
