"""The example notebooks run as they are, and show what is stored in them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.notebooks import FOLDER, differences, execute, read, workplace

pytestmark = pytest.mark.full


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.ipynb")), ids=lambda path: path.stem)
def test_what_is_stored_comes_out(path: Path) -> None:
    stored = read(path)
    with workplace():
        assert differences(stored, execute(stored)) == []
