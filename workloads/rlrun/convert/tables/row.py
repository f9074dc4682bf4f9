"""One row of a table: a key, its field here, and the meaning or the reason."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Literal

How = Literal["value", "joined", "drop", "refuse"]


@dataclass(frozen=True)
class Row:
    """Fate of a key."""

    key: str
    """Dotted; `*` stands for any text."""
    to: str
    """Fields of the manifest below `spec`, by commas; empty: none."""
    how: How
    """`value_row`: the converted value is the field's. `joined_row`: decides fields with others. `dropped_row`, `refused_row`: none."""
    note: str = ""
    """Meaning of the field, or the reason why there is none."""
    values: Mapping[str, object] = field(default_factory=dict)
    """Their value to ours; others stay as they are."""
    convert: str = ""
    """Name of a conversion of `rlrun.convert.conversions`."""
    fine: tuple[object, ...] = ()
    """Values with which `dropped_row` and `refused_row` change nothing: they say what RLRun does anyway."""

    def fits(self, key: str) -> bool:
        """True if this row is about `key`."""
        return _key_pattern(self.key).fullmatch(key) is not None

    def is_fine(self, value: object) -> bool:
        """True if the value says what RLRun does anyway."""
        return any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in self.fine)


@cache
def _key_pattern(key: str) -> re.Pattern[str]:
    escaped = key.replace("[", "[[]")
    return re.compile(fnmatch.translate(escaped))


def value_row(
    key: str,
    to: str,
    note: str = "",
    *,
    values: Mapping[str, object] | None = None,
    convert: str = "",
    fine: tuple[object, ...] = (),
) -> Row:
    """A key whose value becomes one field's."""
    return Row(key, to, "value", note, values or {}, convert, fine)


def joined_row(key: str, to: str, note: str = "", *, fine: tuple[object, ...] = ()) -> Row:
    """A key that decides fields together with others; `note` says why it decides nothing where it does not."""
    return Row(key, to, "joined", note, fine=fine)


def dropped_row(key: str, note: str, *, fine: tuple[object, ...] = ()) -> Row:
    """A key without a field, with the reason."""
    return Row(key, "", "drop", note, fine=fine)


def dropped_rows(start: str, note: str, *names: str) -> tuple[Row, ...]:
    """Keys without a field that share a beginning and the reason, one row each."""
    return tuple(dropped_row(start + name, note) for name in names)


def refused_row(key: str, note: str, *, fine: tuple[object, ...] = (None, False)) -> Row:
    """A key whose value, unless it is one of `fine`, makes the run another one than RLRun can do."""
    return Row(key, "", "refuse", note, fine=fine)


def row_of(key: str, rows: Iterable[Row]) -> Row | None:
    """The first row about a key."""
    return next((row for row in rows if row.fits(key)), None)
