"""Configuration files as plain values: TOML, YAML and JSON.

Documents contain line numbers if the format provides them. The first part finds the lines of a TOML document's keys, which the parser of
the standard library does not report.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import NoReturn

from rlrun.config.loading.fixes.text_slips import toml_slip
from rlrun.config.loading.problems import ConfigError, Problem
from rlrun.config.loading.yaml_text import Document, Key, parse_yaml
from rlrun.config.suggest import close_name
from rlrun.runtime import redact
from rlrun.runtime.processes import DESCRIPTORS

_TRIES_MAX = 5000
"""Most attempts to parse multi-line values. After them, later keys have no line."""
_HEADER = re.compile(r"\s*(\[\[?)\s*(.+?)\s*\]\]?\s*(#.*)?$")
_ENTRY = re.compile(
    r"""\s*(?P<key>(?:"(?:[^"\\]|\\.)*"|'[^']*'|[A-Za-z0-9_-]+|[\s.])+?)\s*=(?P<value>.*)$""", re.DOTALL
)


def toml_lines(text: str) -> dict[Key, int]:
    """Return the line of every key and item of a valid document, by path."""
    lines: dict[Key, int] = {}
    counts: dict[Key, int] = {}
    table: Key = ()
    rest = text.split("\n")
    at, tries = 0, 0
    while at < len(rest):
        number, line = at + 1, rest[at]
        at += 1
        header, entry = _HEADER.fullmatch(line), _ENTRY.fullmatch(line)
        if header and not entry:
            table = _resolve_header(_header_parts(header[2]), counts, lines)
            if header[1] == "[[":
                counts[table] = counts.get(table, -1) + 1
                lines.setdefault(table, number)
                table = (*table, counts[table])
            _mark_line(lines, table, number)
        elif entry:
            value = entry["value"]
            found = _read_value(value)
            while found is None and at < len(rest) and tries < _TRIES_MAX:
                value += "\n" + rest[at]
                at, tries = at + 1, tries + 1
                found = _read_value(value)
            key = (*table, *_header_parts(entry["key"]))
            _mark_line(lines, key, number)
            if found is not None:
                _path_inside(lines, key, found["x"], number)
    return lines


def _read_value(text: str) -> dict[str, object] | None:
    try:
        return tomllib.loads(f"x ={text}")
    except (ValueError, RecursionError):
        return None


def _header_parts(key: str) -> tuple[str, ...]:
    try:
        found: object = tomllib.loads(f"{key} = 0")
    except (ValueError, RecursionError):
        return (key,)
    parts: list[str] = []
    while isinstance(found, dict):
        [(name, found)] = found.items()
        parts.append(name)
    return tuple(parts)


def _resolve_header(parts: tuple[str, ...], counts: dict[Key, int], lines: dict[Key, int]) -> Key:
    """Return a header's path with the index of each list of tables in it. The caller adds the index of the last name."""
    key: Key = ()
    for depth, part in enumerate(parts):
        key = (*key, part)
        if depth + 1 < len(parts) and key in counts:
            key = (*key, counts[key])
    return key


def _mark_line(lines: dict[Key, int], key: Key, number: int) -> None:
    for depth in range(1, len(key) + 1):
        lines.setdefault(key[:depth], number)


def _path_inside(lines: dict[Key, int], key: Key, value: object, number: int) -> None:
    items: Iterable[tuple[str | int, object]] = (
        enumerate(value) if isinstance(value, list) else value.items() if isinstance(value, dict) else ()
    )
    for name, inner in items:
        lines.setdefault((*key, name), number)
        _path_inside(lines, (*key, name), inner, number)


FORMATS = (".toml", ".yaml", ".yml", ".json")
"""Suffixes of configuration files."""
_ADDRESS = "is an address, but only local files are read; download it first, and pass the file's name"
_TOML_PLACE = re.compile(r" \(at line (\d+), column (\d+)\)$")


def read_text(path: Path) -> str:
    """Read a text file.

    Raises:
        ConfigError: The file cannot be read, or is not UTF-8.
    """
    try:
        return path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        if address := re.match(r"([a-z][a-z0-9+.-]+):/+(.+)", str(path)):
            raise ConfigError([Problem(redact.redact_text(f"{address[1]}://{address[2]}", []), "", _ADDRESS)]) from None
        _refuse_file(path, f"no such file{_close_file(path)}")
    except IsADirectoryError:
        _refuse_file(path, f"is a folder, expected a file{_such_as(path, '*')}")
    except UnicodeDecodeError as error:
        _refuse_file(path, f"not UTF-8 text (byte {error.start}); save it as UTF-8")
    except (OSError, ValueError) as error:
        _refuse_file(path, f"cannot be read: {getattr(error, 'strerror', None) or error}")


def _close_file(path: Path) -> str:
    """Suggest a configuration file with a similar name, or explain a `~` or pattern that no shell expanded."""
    if str(path).startswith("~"):
        return "; write ~ without quotes, so that the shell expands it"
    if any(sign in path.name for sign in "*?["):
        return f": no file matches this pattern, and exactly one file is read{_such_as(path.parent, path.name)}"
    try:
        names = [other.name for other in path.parent.iterdir() if other.suffix in FORMATS and other.is_file()]
    except OSError:
        return ""
    stems = {Path(name).stem: name for name in sorted(names, key=lambda name: Path(name).suffix == path.suffix)}
    close = close_name(path.stem, stems)
    return f" (did you mean {stems[close]}?)" if close is not None else ""


def _such_as(folder: Path, pattern: str) -> str:
    """Return a suggestion of a configuration file in a folder, or an empty string."""
    try:
        found = min(
            (str(file) for file in folder.glob(pattern) if file.suffix in FORMATS and file.is_file()), default=None
        )
    except (OSError, ValueError):
        return ""
    return "" if found is None else f"; use a file, such as {found}"


def read_document(path: Path) -> Document:
    """Read the only document of a configuration file, which must be a mapping.

    Raises:
        ConfigError: The file is missing, has an unknown format, is broken (with the line), or is not a mapping.
    """
    # A launcher passes an in-memory file, which is always JSON, by its descriptor.
    suffix = ".json" if path.parent == DESCRIPTORS else path.suffix.lower()
    if suffix not in FORMATS:
        what = f"unknown format {suffix!r}" if suffix else "has no suffix, so that its format is unknown"
        _refuse_file(path, f"{what}; known: {', '.join(FORMATS)}")
    text = read_text(path)
    if suffix == ".toml":
        document = Document(_read_toml(text, path), lines=toml_lines(text))
    elif suffix == ".json":
        document = Document(_read_json(text, path))
    else:
        documents = parse_yaml(text, str(path))
        if len(documents) > 1:
            _refuse_file(path, f"{len(documents)} YAML documents, expected one; split the file")
        document = documents[0] if documents else Document({})
    if not isinstance(document.value, dict):
        _refuse_file(path, "contains no mapping of fields at the top")
    return document


def _read_toml(text: str, path: Path) -> object:
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        reason, found = _failure_reason(error), _TOML_PLACE.search(str(error))
        line = None if found is None else int(found[1])
        if line is not None and found is not None:
            reason = f"{reason.removesuffix(found[0])} (column {found[2]})"
            key = text.splitlines()[line - 1 : line]
            if key and reason.startswith("Cannot overwrite a value"):
                reason = f"duplicate key {key[0].partition('=')[0].strip()!r}; remove one"
        if (slip := toml_slip(text, line)) is not None:
            line, reason = slip.line, slip.message
        raise ConfigError([Problem(str(path), "", f"not TOML: {reason}", line)]) from None


def _read_json(text: str, path: Path) -> object:
    if not text.strip():
        _refuse_file(path, "is empty, expected a mapping of fields")
    try:
        return json.loads(text, object_pairs_hook=_without_duplicates)
    except json.JSONDecodeError as error:
        raise ConfigError([Problem(str(path), "", f"not JSON: {error.msg}", error.lineno)]) from None
    except (ValueError, RecursionError) as error:
        _refuse_file(path, f"not JSON: {_failure_reason(error)}")


def _failure_reason(error: Exception) -> str:
    return "nested too deeply" if isinstance(error, RecursionError) else str(error)


def _without_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    result = dict(pairs)
    if len(result) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"duplicate key {next(key for key in keys if keys.count(key) > 1)!r}; remove one")
    return result


def _refuse_file(path: Path, message: str) -> NoReturn:
    raise ConfigError([Problem(str(path), "", message)]) from None
