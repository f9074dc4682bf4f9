"""Results page of the simulation: each part replaces only its own figures."""

from __future__ import annotations

from pathlib import Path

from tests.sim.results import RESULTS, keep


def test_part_replaces_only_its_own_figures(tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    for title, text in (("One", "1 of 3.\n\n| a |"), ("Two", "2 of 3."), ("One", "3 of 3.")):
        keep(title, text, path)
    page = path.read_text()
    assert page.count("## ") == 2
    assert "1 of 3" not in page
    assert page.index("## One") < page.index("3 of 3.") < page.index("## Two") < page.index("2 of 3.")


def test_table_starts_a_separate_paragraph(tmp_path: Path) -> None:
    keep("Table", "| a |\n|---|\n| 1 |", tmp_path / "page.md")
    assert ".\n\n| a |\n" in (tmp_path / "page.md").read_text()


def test_committed_page_has_every_part() -> None:
    titles = [line for line in RESULTS.read_text().splitlines() if line.startswith("## ")]
    assert titles == [
        "## Random histories",
        "## Planted bugs",
        "## Hostile input",
        "## A day with a fault a minute",
        "## Random histories of engines",
        "## Random histories of an elastic trainer",
    ]
