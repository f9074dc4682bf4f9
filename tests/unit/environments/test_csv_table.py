"""Random access to rows of CSV files."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlrun.environments.dataset_rows import CsvTable

CELLS = st.text(st.characters(codec="utf-8", exclude_characters="\x00"), max_size=8)


def table(folder: Path, text: str) -> CsvTable:
    path = folder / "rows.csv"
    path.write_bytes(text.encode())
    return CsvTable(path)


def test_rows_are_found_by_number_for_any_content(tmp_path: Path) -> None:
    rows = table(
        tmp_path, '\ufeffprompt,reward_model.ground_truth,n\r\n"two\nlines, ""quoted""",4,\r\n\r\nplain,5,x\r\n'
    )
    assert len(rows) == 2
    assert rows.row(1) == {"prompt": "plain", "reward_model": {"ground_truth": "5"}, "n": "x"}
    assert rows.row(0) == {"prompt": 'two\nlines, "quoted"', "reward_model": {"ground_truth": "4"}}
    assert (rows.describe_place(0), rows.describe_place(1)) == ("line 2", "line 5")


@given(st.lists(st.tuples(CELLS, CELLS), max_size=6))
def test_csv_table_returns_written_rows(
    tmp_path_factory: pytest.TempPathFactory, written: list[tuple[str, str]]
) -> None:
    path = tmp_path_factory.mktemp("csv") / "rows.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([("a", "b"), *written])
    rows = CsvTable(path)
    expected = [{name: cell for name, cell in zip("ab", cells, strict=True) if cell} for cells in written]
    assert [rows.row(i) for i in reversed(range(len(rows)))] == expected[::-1]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "the file is empty; its first line has to name the columns"),
        ("a,,b\n", "column 2 of the first line has the name ''; give each column a name"),
        ("a,a\n", "contains the column 'a' twice"),
        ("a,a.b\n", "contains the column 'a' twice"),
        ('a,b\n"1,2\n', "line 2: it is not CSV"),
    ],
)
def test_invalid_csv_file_is_refused(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        table(tmp_path, text)


def test_csv_row_of_other_width_is_refused_with_line(tmp_path: Path) -> None:
    rows = table(tmp_path, "a,b\n1,2\n3\n")
    assert rows.row(0) == {"a": "1", "b": "2"}
    with pytest.raises(ValueError, match="it has 1 values, and the first line names 2 columns"):
        rows.row(1)


def test_csv_file_of_other_encoding_is_refused(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_bytes(b"a\n\xe9\n")
    with pytest.raises(ValueError, match="line 2: it is not UTF-8"):
        CsvTable(tmp_path / "rows.csv")
