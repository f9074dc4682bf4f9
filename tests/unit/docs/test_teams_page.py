"""The table of docs/teams.md equals the tested actions."""

from pathlib import Path

from tests.support.teams import table

PAGE = Path(__file__).parents[3] / "docs" / "teams.md"


def test_teams_page_contains_tested_table() -> None:
    text = PAGE.read_text()
    assert text.count(table()) == 1, f"put this into {PAGE.name}:\n{table()}"
