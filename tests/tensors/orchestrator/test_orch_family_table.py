"""Table of chat templates in `docs/models.md`, compared with played conversations."""

from __future__ import annotations

import pytest

from tests.support.chat_templates import FAMILIES
from tests.support.family_conversations import Cell
from tests.support.family_table import is_sound, row, rows_of_page


@pytest.mark.parametrize("name", FAMILIES)
async def test_family_table_row_matches_played_conversations(name: str) -> None:
    """`python -m tests.support.family_table` rewrites the page."""
    assert await row(name) in rows_of_page()


def test_family_table_has_no_extra_rows() -> None:
    assert len(rows_of_page()) == len(FAMILIES)


@pytest.mark.parametrize(
    ("cell", "strategy", "sound"),
    [
        (Cell("", True, True, True, 1), "branching", True),
        (Cell("", True, True, False, 1), "interleaved", True),
        (Cell("", True, True, False, 1), "branching", False),
        (Cell("refused", True, True, True, 1), "interleaved", False),
        (Cell("", False, True, True, 1), "interleaved", False),
        (Cell("", True, False, True, 1), "interleaved", False),
    ],
)
def test_family_table_cell_requires_all_conditions(cell: Cell, strategy: str, sound: bool) -> None:
    assert is_sound("chat", strategy, cell) is sound
