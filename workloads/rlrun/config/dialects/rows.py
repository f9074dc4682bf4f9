"""A dialect: rows that say what becomes of another project's keys, and their look-up by path.

A path is dotted; `name[]` is each item of a list, `*` any one name, and a row covers all that lies below it unless other rows do.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

Fate = Literal["same", "mapped", "ignored", "refused"]


@dataclass(frozen=True)
class Set:
    """Give a field a value; `[]` in the path is the item that the key is in."""

    path: str
    value: object


@dataclass(frozen=True)
class Extend:
    """Add items to the list of a field."""

    path: str
    items: Sequence[object]


@dataclass(frozen=True)
class Note:
    """Tell the user something that does not stop the run."""

    text: str


@dataclass(frozen=True)
class Refuse:
    """Refuse the value, with the counterpart or the reason why there is none."""

    text: str


@dataclass(frozen=True)
class Later:
    """Keep a value that means something only beside others, for `complete`."""

    name: str
    value: object


Effect = Set | Extend | Note | Refuse | Later
Conversion = Callable[[object, str], Iterable[Effect]]
"""The effects of a value; the second argument is the row's first target. Total: a value of a wrong type is set as it is, and refused
by the field."""


@dataclass(frozen=True)
class Row:
    """One key of the dialect."""

    path: str
    fate: Fate
    targets: tuple[str, ...] = ()
    """Our fields that take the value, or that a refusal recommends; by Python names from the root of a run's description."""
    text: str = ""
    """Ignored: why that is right. Refused: the counterpart, or why there is none."""
    convert: Conversion | None = None
    """Change of the value; None: none."""
    by_name: Callable[[str], Conversion] | None = None
    """Conversion for the name at the end of a path with `*`."""

    def effects(self, value: object, name: str) -> list[Effect]:
        """Effects of a value at a key of that name."""
        convert = self.by_name(name) if self.by_name is not None else self.convert
        if convert is not None:
            return list(convert(value, self.targets[0] if self.targets else ""))
        if self.fate == "mapped":
            return [Set(self.targets[0], value)]
        return [Note(f"ignored: {self.text}")] if self.fate == "ignored" else [Refuse(self.text)]


def same_key(path: str, *targets: str) -> Row:
    """A key that is a field here too, of the same meaning."""
    return Row(path, "same", targets or (path,))


def mapped_key(path: str, *targets: str, by: Conversion | None = None, text: str = "") -> Row:
    """A key that another field takes."""
    return Row(path, "mapped", targets, text, by)


def ignored_key(path: str, text: str, by: Conversion | None = None) -> Row:
    """A key without effect here; `text` says why that is right."""
    return Row(path, "ignored", (), text, by)


def refused_key(path: str, text: str, *targets: str) -> Row:
    """A key that cannot be taken; `text` is the counterpart (a field in `targets`), or the reason why there is none."""
    return Row(path, "refused", targets, text)


@dataclass(frozen=True)
class Dialect:
    """All rows of one project."""

    name: str
    rows: tuple[Row, ...]

    @cached_property
    def _by_path(self) -> Mapping[str, Row]:
        return {row.path: row for row in self.rows}

    @cached_property
    def _patterns(self) -> list[tuple[re.Pattern[str], Row]]:
        """Rows with `*`, the most literal first."""
        rows = sorted((row for row in self.rows if "*" in row.path), key=lambda row: -len(row.path))
        return [(_key_pattern(row.path), row) for row in rows]

    @cached_property
    def _parents(self) -> frozenset[str]:
        return frozenset(parent for row in self.rows for parent in _key_parents(row.path))

    @cached_property
    def _parent_patterns(self) -> list[re.Pattern[str]]:
        return [_key_pattern(parent) for parent in self._parents if "*" in parent]

    def find(self, path: str) -> Row | None:
        """The row of a path."""
        if path in self._by_path:
            return self._by_path[path]
        return next((row for pattern, row in self._patterns if pattern.fullmatch(path)), None)

    def has_below(self, path: str) -> bool:
        """True if rows begin with this path; those with `*` count for a path that has no row of its own."""
        if path in self._by_path:
            return path in self._parents
        return path in self._parents or any(pattern.fullmatch(path) for pattern in self._parent_patterns)

    def names_below(self, path: str) -> list[str]:
        """The next names of all rows below a path."""
        start = f"{path}." if path else ""
        below = (row.path.removeprefix(start) for row in self.rows if row.path.startswith(start))
        return sorted({re.split(r"[.\[]", name)[0] for name in below} - {"*"})


def _key_pattern(path: str) -> re.Pattern[str]:
    return re.compile(re.escape(path).replace(r"\*", r"[^.\[\]]+"))


def _key_parents(path: str) -> Iterable[str]:
    for end in re.finditer(r"\.|\[\]", path):
        yield path[: end.start()]
        if end.group() == "[]" and end.end() < len(path):
            yield path[: end.end()]
