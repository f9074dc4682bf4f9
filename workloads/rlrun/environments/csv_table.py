"""Random access to the rows of a CSV file.

The file is UTF-8 with commas; its first line names the columns. Quoted values may contain line breaks.
"""

from __future__ import annotations

import csv
import io
import os
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

MAX_CELL_CHARACTERS = 16 * 1024 * 1024
_BOM = b"\xef\xbb\xbf"


class CsvTable:
    """Rows of a CSV file. Every value is a text; empty values are left out of the row. Only the rows' positions are kept in memory.

    A column `a.b` becomes the field `b` of the field `a`, so `reward_model.ground_truth` gives the same row as nested JSON.

    Args:
        path: CSV file.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is not CSV, or its first line does not name the columns.
    """

    def __init__(self, path: Path) -> None:
        csv.field_size_limit(MAX_CELL_CHARACTERS)
        self._file = path.open("rb")
        self._starts, self._lines = array("q"), array("q")
        counted = _Counted(self._file)
        reader = csv.reader(counted, strict=True)
        before = 0, 1
        self._columns: list[str] | None = None
        try:
            for cells in reader:
                if self._columns is None and cells:
                    self._columns = _read_header(cells)
                elif cells:
                    self._starts.append(before[0])
                    self._lines.append(before[1])
                before = counted.position, counted.lines + 1
        except csv.Error as error:
            raise ValueError(f"line {counted.lines}: it is not CSV: {error}") from None
        if self._columns is None:
            raise ValueError("the file is empty; its first line has to name the columns")
        self._end = before[0]

    def __len__(self) -> int:
        return len(self._starts)

    def row(self, index: int) -> dict[str, object]:
        assert self._columns is not None
        start = self._starts[index]
        end = self._starts[index + 1] if index + 1 < len(self._starts) else self._end
        text = os.pread(self._file.fileno(), end - start, start).decode()
        cells = next(csv.reader(io.StringIO(text, newline=""), strict=True))
        if len(cells) != len(self._columns):
            raise ValueError(f"it has {len(cells)} values, and the first line names {len(self._columns)} columns")
        row: dict[str, object] = {}
        for column, cell in zip(self._columns, cells, strict=True):
            *outer, name = column.split(".")
            if cell:
                place = row
                for part in outer:
                    inner = place.setdefault(part, {})
                    assert isinstance(inner, dict)  # see `_read_header`
                    place = inner
                place[name] = cell
        return row

    def describe_place(self, index: int) -> str:
        return f"line {self._lines[index]}"


class _Counted:
    """Lines of a file as texts, with the number of bytes and lines that were read."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self.position, self.lines = file, 0, 0

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        line = self._file.readline()
        if not line:
            raise StopIteration
        self.position += len(line)
        self.lines += 1
        try:
            return (line.removeprefix(_BOM) if self.lines == 1 else line).decode()
        except UnicodeDecodeError:
            raise ValueError(f"line {self.lines}: it is not UTF-8; save the file as UTF-8") from None


def _read_header(cells: list[str]) -> list[str]:
    """Return the column names. Raises ValueError if a name is empty or occurs twice."""
    names = [cell.strip() for cell in cells]
    for i, name in enumerate(names):
        if not name or "" in name.split("."):
            raise ValueError(f"column {i + 1} of the first line has the name {name!r}; give each column a name")
        if name in names[:i] or any(other.startswith(f"{name}.") for other in names):
            raise ValueError(f"the first line contains the column {name!r} twice; give each column a different name")
    return names
