"""Each cell of the table of chat templates in `docs/models.md` is played: no family is claimed that fails one."""

from __future__ import annotations

import pytest

from tests.support.chat_templates import FAMILIES
from tests.support.family_conversations import Cell
from tests.support.family_table import is_sound, row, rows_of_page


@pytest.mark.parametrize("name", FAMILIES)
async def test_each_row_of_the_page_is_what_conversations_show(name: str) -> None:
    """Written again by `python -m tests.support.family_table`."""
    assert await row(name) in rows_of_page()


def test_the_page_has_no_other_row() -> None:
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
def test_a_cell_is_claimed_only_if_all_of_it_holds(cell: Cell, strategy: str, sound: bool) -> None:
    assert is_sound("chat", strategy, cell) is sound
