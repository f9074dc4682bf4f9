"""Package folders have docstrings that describe their content."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
ROOMS = sorted(
    {
        file.parent
        for package in ("workloads/rlrun", "operator/rlrun_operator")
        for file in (ROOT / package).rglob("*.py")
    }
)


@pytest.mark.parametrize("room", ROOMS, ids=lambda room: str(room.relative_to(ROOT)))
def test_room_has_a_docstring(room: Path) -> None:
    assert ast.get_docstring(ast.parse((room / "__init__.py").read_text()))
