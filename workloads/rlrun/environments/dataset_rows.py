"""Random access to the rows of one data set: JSONL, CSV, parquet, Arrow files of `datasets`, and data sets of the hub.

Rows are returned as read; nothing is tokenized here. A CSV file is UTF-8 with commas, and its first line names the columns. Quoted values
may contain line breaks.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import BinaryIO, Protocol

from rlrun.config.models.data import DataSetConfig
from rlrun.hub.fetch import fetch_rows
from rlrun.hub.repository import Repository
from rlrun.protocol.files.failures import RoleError
from rlrun.runtime import exit_codes

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


_SUFFIXES = (".jsonl", ".parquet", ".arrow")
PATTERNS = (*(f"*{suffix}" for suffix in _SUFFIXES), "*.csv")
"""Patterns of data files. A folder's CSV files count only if it has no other data file: many data sets contain the same rows as CSV."""
_EDGE_BYTES = 65536
_READ_AHEAD = 64
"""Rows that are read from a columnar file at once if the reader reads rows in order."""


class RowError(ValueError):
    """Error for an unusable row. The message contains its file and line."""


class Table(Protocol):
    """Rows of one file."""

    def __len__(self) -> int: ...

    def row(self, index: int) -> dict[str, object]:
        """Return row `index`. Raises ValueError if it is not a row."""
        ...

    def describe_place(self, index: int) -> str:
        """Return the name of a row for messages: `line 3` or `row 3`."""
        ...


_LOOKED_AT = 64
"""Bytes of a broken line that are read to find the mistake."""
_KINDS: Mapping[type, str] = {
    list: "a list",
    int: "a number",
    float: "a number",
    bool: "true or false",
    type(None): "null",
}


class JsonLines:
    """Rows of a JSONL file. Only the positions of the lines are kept in memory, 8 bytes each; empty lines are skipped.

    Args:
        path: JSONL file.

    Raises:
        OSError: the file cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("rb")
        self._starts, self._lines = array("q"), array("q")
        position = 0
        for number, line in enumerate(self._file, 1):
            if line.strip():
                self._starts.append(position)
                self._lines.append(number)
            position += len(line)
        self._end = position

    def __len__(self) -> int:
        return len(self._starts)

    def row(self, index: int) -> dict[str, object]:
        start = self._starts[index]
        end = self._starts[index + 1] if index + 1 < len(self._starts) else self._end
        try:
            found = json.loads(os.pread(self._file.fileno(), end - start, start))
        except UnicodeDecodeError as error:
            raise ValueError(f"it is not UTF-8 text (byte {error.start}); save the file as UTF-8") from None
        except ValueError as error:
            line = os.pread(self._file.fileno(), min(end - start, _LOOKED_AT), start).lstrip()
            fix = "; write names and texts in double quotes" if line.startswith(b"{'") else ""
            raise ValueError(f"it is not JSON: {error}{fix}") from None
        if not isinstance(found, dict):
            kind = _KINDS.get(type(found), "a text")
            raise ValueError(
                f'it is {kind}, expected one JSON object per line, such as {{"prompt": ..., "answer": ...}}'
            )
        return found

    def describe_place(self, index: int) -> str:
        return f"line {self._lines[index]}"


class ArrowTable:
    """Rows of a parquet file, or of an Arrow file that `datasets` saved.

    Args:
        path: data file. An Arrow file is mapped into memory, a parquet file is read.

    Raises:
        OSError: the file cannot be read, or is damaged.
        ValueError: the file is damaged.
        RoleError: the package pyarrow is missing.
    """

    def __init__(self, path: Path) -> None:
        try:
            import pyarrow as pa
            import pyarrow.parquet as pq
        except ImportError as error:
            raise RoleError(
                f"{path} needs the package pyarrow, which this image does not have; install it, or convert the data to JSONL",
                exit_codes.CONFIGURATION,
            ) from error
        self._ahead: list[dict[str, object]] = []
        """Rows that were read ahead, last row first."""
        self._next = -1
        """Index of the row after the most recent one."""
        if path.suffix == ".parquet":
            self._table = pq.read_table(path)
            return
        source = pa.memory_map(str(path))
        try:
            self._table = pa.ipc.open_stream(source).read_all()
        except pa.ArrowInvalid:
            self._table = pa.ipc.open_file(source).read_all()

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def row(self, index: int) -> dict[str, object]:
        # A slice costs more than its rows, so a reader that reads rows in order gets several rows per slice.
        if index != self._next or not self._ahead:
            count = _READ_AHEAD if index == self._next else 1
            self._ahead = self._table.slice(index, count).to_pylist()[::-1]
        self._next = index + 1
        row = self._ahead.pop()
        return {name: _without_nulls(value) for name, value in row.items() if value is not None}

    def describe_place(self, index: int) -> str:
        return f"row {index + 1}"


def _without_nulls(value: object) -> object:
    """Value without null fields: columnar files give every struct all fields, including the absent ones."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


class Rows:
    """All rows of a data set, file after file.

    Args:
        config: location of the data set.
        field: manifest field of the data set, for messages, such as `data.sources[0]`.

    Raises:
        RoleError: the data set is missing, unreadable or empty.
    """

    def __init__(self, config: DataSetConfig, field: str) -> None:
        self.label = config.label
        files = _list_files(config, field)
        self._names = [path.name for path in files]
        self._tables = [_open_rows(path, field) for path in files]
        self._ends = list(accumulate(len(table) for table in self._tables))
        if not self._ends[-1]:
            raise RoleError(f"{field}: {self.label} has no rows", exit_codes.DATA)
        self.fingerprint = _files_fingerprint(files, self._ends)
        """Digest that later attempts compare to detect changed files."""

    def __len__(self) -> int:
        return self._ends[-1]

    def row(self, index: int) -> dict[str, object]:
        """Return row `index`.

        Raises:
            RowError: the line is not a row; the message contains file and line.
        """
        table, inner = self._locate_row(index)
        try:
            return self._tables[table].row(inner)
        except ValueError as error:
            raise RowError(f"{self.describe_place(index)}: {error}") from None

    def describe_place(self, index: int) -> str:
        """Return the file and line of a row."""
        table, inner = self._locate_row(index)
        return f"{self._names[table]} {self._tables[table].describe_place(inner)}"

    def _locate_row(self, index: int) -> tuple[int, int]:
        table = bisect_right(self._ends, index)
        return table, index - (self._ends[table - 1] if table else 0)


def _open_rows(path: Path, field: str) -> Table:
    try:
        if path.suffix == ".csv":
            return CsvTable(path)
        return JsonLines(path) if path.suffix == ".jsonl" else ArrowTable(path)
    except OSError as error:
        raise RoleError(f"{field}: cannot read {path}: {error.strerror or error}", exit_codes.DATA) from error
    except ValueError as error:
        raise RoleError(f"{field}: cannot read {path}: {error}", exit_codes.DATA) from error


def _list_files(config: DataSetConfig, field: str) -> list[Path]:
    if config.path is not None:
        root = Path(config.path)
        if root.is_file():
            if root.suffix not in (*_SUFFIXES, ".csv"):
                raise RoleError(
                    f"{field}.path: {root.name} is not a .jsonl, .csv, .parquet or .arrow file; convert it to one of them",
                    exit_codes.CONFIGURATION,
                )
            return [root]
        if not root.is_dir():
            absent = FileNotFoundError(root) if root.is_absolute() else None  # the file may be on a pod's volume
            raise RoleError(f"{field}.path: no file or folder {root}", exit_codes.DATA) from absent
    else:
        root = download_set(config.name or "", field, config.revision)
    found = sorted(
        path
        for pattern in PATTERNS
        for path in root.rglob(pattern)
        # `datasets` keeps results of its own computations (`cache-*`) next to a saved data set.
        if _in_split(path, root, config.split) and not path.name.startswith("cache-")
    )
    if any(path.suffix != ".csv" for path in found):
        found = [path for path in found if path.suffix != ".csv"]
    if not found:
        of_split = f" of split {config.split!r}" if config.split else ""
        raise RoleError(
            f"{field}: {config.label} has no .jsonl, .csv, .parquet or .arrow file{of_split}", exit_codes.DATA
        )
    return found


def _in_split(path: Path, root: Path, split: str | None) -> bool:
    words = {part for piece in path.relative_to(root).with_suffix("").parts for part in _plain_words(piece)}
    return split is None or split in words or split in path.relative_to(root).parts


def _plain_words(text: str) -> list[str]:
    return "".join(char if char.isalnum() else " " for char in text).split()


def download_set(name: str, field: str, revision: str | None = None) -> Path:
    """Return the folder of a data set of the hub. Download it unless it is in the hub's cache.

    Args:
        name: name of the data set.
        field: manifest field with the name, for errors.
        revision: branch, tag or commit. None: the main branch, at the commit that the run resolved first.

    Raises:
        RoleError: the data set does not exist or cannot be downloaded. The message contains the field and a fix.
    """
    repository = Repository("dataset", name, revision, f"{field}.name", f"{field}.revision")
    return fetch_rows(repository, PATTERNS)


def _files_fingerprint(files: Sequence[Path], ends: Sequence[int]) -> str:
    """Return a digest of the names, numbers of rows, sizes, and first and last 64 KiB of all files."""
    digest = hashlib.sha256()
    for path, end in zip(files, ends, strict=True):
        size = path.stat().st_size
        digest.update(f"{path.name}\0{end}\0{size}\0".encode())
        with path.open("rb") as file:
            digest.update(file.read(_EDGE_BYTES))
            file.seek(max(0, size - _EDGE_BYTES))
            digest.update(file.read(_EDGE_BYTES))
    return digest.hexdigest()[:16]
