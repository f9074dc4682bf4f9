"""Line numbers of the keys of a TOML document, which the standard library's parser does not report."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable

from rlrun.config.loading.yaml_text import Key

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
