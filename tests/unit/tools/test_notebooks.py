"""Notebook runner: displayed results of cells, and detection of changed outputs."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from tools.notebooks import FOLDER, differences, execute, read


def notebook(*sources: str, tags: tuple[str, ...] = ()) -> dict[str, Any]:
    cells = [
        {"cell_type": "code", "metadata": {"tags": list(tags)}, "source": [text], "outputs": []} for text in sources
    ]
    return {"cells": [{"cell_type": "markdown", "metadata": {}, "source": ["# A"]}, *cells]}


def test_cells_share_a_namespace_and_show_their_last_value() -> None:
    done = execute(notebook("a = 2\nprint(a)", "a + 1", "a = 5"))
    printed, shown, silent = [cell["outputs"] for cell in done["cells"][1:]]
    assert printed == [{"output_type": "stream", "name": "stdout", "text": ["2\n"]}]
    assert shown[0]["data"] == {"text/plain": ["3"]}
    assert silent == []


def test_picture_is_stored_by_its_type() -> None:
    shown = execute(notebook("class P:\n    def _repr_svg_(self):\n        return '<svg/>'\nP()"))["cells"][1][
        "outputs"
    ]
    assert shown[0]["data"]["image/svg+xml"] == ["<svg/>"]


def test_failing_cell_raises_error() -> None:
    with pytest.raises(ZeroDivisionError):
        execute(notebook("1 / 0"))


@pytest.mark.parametrize(
    ("before", "after", "tags", "same"),
    [
        ("print('took 3s')", "print('took 14.5s')", (), True),
        ("print('took 3 s at 02:41:59Z')", "print('took 2m03s at 02:41:58Z')", (), True),
        ("print('step 3')", "print('step 4')", (), False),
        ("print('step 3')", "print('step 4')", ("varies",), True),
        ("1", "print(1)", ("varies",), False),
    ],
)
def test_output_differences_are_detected(before: str, after: str, tags: tuple[str, ...], *, same: bool) -> None:
    stored, done = execute(notebook(before, tags=tags)), execute(notebook(after, tags=tags))
    assert (differences(stored, done) == []) == same


def test_example_notebooks_have_outputs_without_machine_paths() -> None:
    found = sorted(FOLDER.glob("*.ipynb"))
    assert len(found) == 2
    for path in found:
        document = read(path)
        code = [cell for cell in document["cells"] if cell["cell_type"] == "code"]
        assert all(cell["outputs"] for cell in code), path
        assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
        assert differences(document, copy.deepcopy(document)) == []
        assert "/work/" not in path.read_text()
        assert "/tmp/" not in path.read_text()
