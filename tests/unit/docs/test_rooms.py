"""Each folder of the packages is a room: few enough modules to know, and a line that says what lives there."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
MODULES_MAX = 16
ROOMS = sorted(
    {
        file.parent
        for package in ("workloads/rlrun", "operator/rlrun_operator")
        for file in (ROOT / package).rglob("*.py")
    }
)


@pytest.mark.parametrize("room", ROOMS, ids=lambda room: str(room.relative_to(ROOT)))
def test_a_room_has_few_modules_and_says_what_lives_there(room: Path) -> None:
    modules = [file.stem for file in room.glob("*.py") if not file.stem.startswith("__")]
    assert len(modules) <= MODULES_MAX, sorted(modules)
    assert ast.get_docstring(ast.parse((room / "__init__.py").read_text()))
