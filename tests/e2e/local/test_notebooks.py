"""Example notebooks, executed and compared with their stored outputs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.notebooks import FOLDER, differences, execute, read, workplace

pytestmark = pytest.mark.full


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.ipynb")), ids=lambda path: path.stem)
def test_notebook_outputs_equal_stored_outputs(path: Path) -> None:
    stored = read(path)
    with workplace():
        assert differences(stored, execute(stored)) == []
