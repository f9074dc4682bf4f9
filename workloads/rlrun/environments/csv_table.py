"""A CSV file as rows by number: UTF-8, commas, a first line with the names of the columns, values that may hold line breaks in quotes."""

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
    """A CSV file; every value is a text, and an empty one is no value. Only the positions of its rows are kept.

    A column `a.b` is the field `b` of the column `a`, so `reward_model.ground_truth` is what it is in JSON.

    Args:
        path: the file.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no CSV file, or has no usable first line.
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
            raise ValueError(f"line {counted.lines}: it is no CSV: {error}") from None
        if self._columns is None:
            raise ValueError("it is empty; its first line has to name the columns")
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
    """The lines of a file as texts; knows how many bytes and lines it has given."""

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
            raise ValueError(f"line {self.lines}: it is no UTF-8; save the file as UTF-8") from None


def _read_header(cells: list[str]) -> list[str]:
    """Names of the columns. Raises ValueError: one is empty, or there twice."""
    names = [cell.strip() for cell in cells]
    for i, name in enumerate(names):
        if not name or "" in name.split("."):
            raise ValueError(f"the first line names column {i + 1} {name!r}; give each column a name")
        if name in names[:i] or any(other.startswith(f"{name}.") for other in names):
            raise ValueError(f"the first line names the column {name!r} twice; give each column a name of its own")
    return names
