"""Rows of a dialect: the keys of another project, their lookup by path, and checks of their values.

A row describes what happens to a key. Paths are dotted. `name[]` is each item of a list, `*` is any one name, and a row covers everything
below it without its own row.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, TypeGuard

Fate = Literal["same", "mapped", "ignored", "refused"]


@dataclass(frozen=True)
class Set:
    """Set a field to a value; `[]` in the path is the index of the item with the key."""

    path: str
    value: object


@dataclass(frozen=True)
class Extend:
    """Append items to a field's list."""

    path: str
    items: Sequence[object]


@dataclass(frozen=True)
class Note:
    """Report a notice to the user, which does not stop the run."""

    text: str


@dataclass(frozen=True)
class Refuse:
    """Refuse the value, with an alternative or the reason."""

    text: str


@dataclass(frozen=True)
class Later:
    """Keep a value for `complete`, because it has a meaning only together with others."""

    name: str
    value: object


Effect = Set | Extend | Note | Refuse | Later
Conversion = Callable[[object, str], Iterable[Effect]]
"""Function from a value and the row's first target to effects. Total: it sets a value of a wrong type unchanged, and the field
refuses it."""


@dataclass(frozen=True)
class Row:
    """One key of the dialect."""

    path: str
    fate: Fate
    targets: tuple[str, ...] = ()
    """Our fields that take the value or that a refusal recommends, by Python names from the root of a run's description."""
    text: str = ""
    """Ignored key: why ignoring it is right. Refused key: the alternative, or the reason."""
    convert: Conversion | None = None
    """Conversion of the value; None: no conversion."""
    by_name: Callable[[str], Conversion] | None = None
    """Function from the last name of a path with `*` to its conversion."""

    def list_effects(self, value: object, name: str) -> list[Effect]:
        """Return the effects of a value at a key with this last name."""
        convert = self.by_name(name) if self.by_name is not None else self.convert
        if convert is not None:
            return list(convert(value, self.targets[0] if self.targets else ""))
        if self.fate == "mapped":
            return [Set(self.targets[0], value)]
        return [Note(f"ignored: {self.text}")] if self.fate == "ignored" else [Refuse(self.text)]


def same_key(path: str, *targets: str) -> Row:
    """Build the row of a key with the same name and meaning here."""
    return Row(path, "same", targets or (path,))


def mapped_key(path: str, *targets: str, by: Conversion | None = None, text: str = "") -> Row:
    """Build the row of a key that becomes another field."""
    return Row(path, "mapped", targets, text, by)


def ignored_key(path: str, text: str, by: Conversion | None = None) -> Row:
    """Build the row of a key without effect here; `text` explains why that is right."""
    return Row(path, "ignored", (), text, by)


def refused_key(path: str, text: str, *targets: str) -> Row:
    """Build the row of an unsupported key; `text` has the alternative (a field in `targets`) or the reason."""
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
    def _wildcard_rows(self) -> list[tuple[re.Pattern[str], Row]]:
        """Rows with `*`, the longest path first."""
        rows = sorted((row for row in self.rows if "*" in row.path), key=lambda row: -len(row.path))
        return [(_key_pattern(row.path), row) for row in rows]

    @cached_property
    def _parent_paths(self) -> frozenset[str]:
        return frozenset(parent for row in self.rows for parent in _key_parents(row.path))

    @cached_property
    def _parent_patterns(self) -> list[re.Pattern[str]]:
        return [_key_pattern(parent) for parent in self._parent_paths if "*" in parent]

    def find_row(self, path: str) -> Row | None:
        """Return the row of a path, or None."""
        if path in self._by_path:
            return self._by_path[path]
        return next((row for pattern, row in self._wildcard_rows if pattern.fullmatch(path)), None)

    def has_below(self, path: str) -> bool:
        """Return whether there are rows below a path. Rows with `*` count only for a path without its own row."""
        if path in self._by_path:
            return path in self._parent_paths
        return path in self._parent_paths or any(pattern.fullmatch(path) for pattern in self._parent_patterns)

    def names_below(self, path: str) -> list[str]:
        """Return the next names of all rows below a path, sorted."""
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


ALL_TASKS = 1_000_000
"""Largest number of tasks of an evaluation, which means all tasks."""
_NOTHING = (None, "None", "none", "null")


def is_nothing(value: object) -> bool:
    """Return whether a value means none."""
    return value is None or (isinstance(value, str) and value in _NOTHING)


def is_number(value: object) -> TypeGuard[int | float]:
    """Return whether a value is a number and not a boolean."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_count(value: object) -> TypeGuard[int]:
    """Return whether a value is a whole number of at least 1."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def show_value(value: object) -> str:
    """Return a value for a message, truncated to 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else text[:60] + "…"
