"""The table of docs/teams.md is that of the deeds that are tried."""

from pathlib import Path

from tests.support.teams import table

PAGE = Path(__file__).parents[3] / "docs" / "teams.md"


def test_the_page_has_the_table_of_what_is_tried() -> None:
    text = PAGE.read_text()
    assert text.count(table()) == 1, f"put this into {PAGE.name}:\n{table()}"
