"""Rows of the conversion tables: one key, its field in RLRun, and the meaning or the reason.

`read_rows` reads rows from a text file: `[how] reason`, followed by `block: key key=VALUE key=VALUE|VALUE ...`. VALUE is a value in JSON
with which the key changes nothing, because it matches RLRun's behavior. The last part has the names of layers that can have an adapter.
"""

from __future__ import annotations

import fnmatch
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Literal

How = Literal["value", "joined", "drop", "refuse"]


@dataclass(frozen=True)
class Row:
    """Mapping of one key."""

    key: str
    """Dotted key; `*` matches any text."""
    to: str
    """Fields of the manifest below `spec`, separated by commas; empty: none."""
    how: How
    """`value_row`: one field with the converted value. `joined_row`: fields that several keys determine together.
    `dropped_row`, `refused_row`: none."""
    note: str = ""
    """Meaning of the field, or the reason why there is none."""
    values: Mapping[str, object] = field(default_factory=dict)
    """Values of the other trainer -> RLRun's values; all other values stay unchanged."""
    convert: str = ""
    """Name of a conversion in `rlrun.convert.draft`."""
    fine: tuple[object, ...] = ()
    """Values with which `dropped_row` and `refused_row` change nothing, because they match RLRun's behavior."""

    def matches_key(self, key: str) -> bool:
        """Return whether this row matches `key`."""
        return _key_pattern(self.key).fullmatch(key) is not None

    def is_fine(self, value: object) -> bool:
        """Return whether the value matches RLRun's behavior."""
        return any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in self.fine)


@cache
def _key_pattern(key: str) -> re.Pattern[str]:
    # `[` is part of a key here, not the start of a character set.
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
    """Return the row of a key whose value becomes the value of one field."""
    return Row(key, to, "value", note, values or {}, convert, fine)


def joined_row(key: str, to: str, note: str = "", *, fine: tuple[object, ...] = ()) -> Row:
    """Return the row of a key that determines fields together with other keys; `note` is the reason if it has no effect."""
    return Row(key, to, "joined", note, fine=fine)


def dropped_row(key: str, note: str, *, fine: tuple[object, ...] = ()) -> Row:
    """Return the row of a key without a field; `note` is the reason."""
    return Row(key, "", "drop", note, fine=fine)


def dropped_rows(start: str, note: str, *names: str) -> tuple[Row, ...]:
    """Return the rows of keys without a field that share a prefix and the reason."""
    return tuple(dropped_row(start + name, note) for name in names)


def refused_row(key: str, note: str, *, fine: tuple[object, ...] = (None, False)) -> Row:
    """Return the row of a key that RLRun does not support, except with a value in `fine`."""
    return Row(key, "", "refuse", note, fine=fine)


def row_of(key: str, rows: Iterable[Row]) -> Row | None:
    """Return the first row that matches a key, or None."""
    return next((row for row in rows if row.matches_key(key)), None)


_GROUP = re.compile(r"\[(drop|refuse)\] (.+)")
_MAKE = {"drop": dropped_row, "refuse": refused_row}


def read_rows(name: str) -> tuple[Row, ...]:
    """Return the rows of a text file next to this module.

    Raises:
        ValueError: a line has another format.
    """
    rows: list[Row] = []
    how, note = "", ""
    for line in (Path(__file__).parent / name).read_text(encoding="utf-8").splitlines():
        if (group := _GROUP.fullmatch(line)) is not None:
            how, note = group.groups()
        elif line and not line.startswith("#"):
            block, colon, keys = line.partition(": ")
            if not how or not colon:
                raise ValueError(f"{name}: {line!r} is not `block: key ...` below `[drop] reason`")
            rows += [_key_row(how, note, f"{block}." if block else "", word) for word in keys.split()]
    return tuple(rows)


def _key_row(how: str, note: str, block: str, word: str) -> Row:
    key, equals, values = word.partition("=")
    fine = tuple(json.loads(value) for value in values.split("|")) if equals else ()
    return _MAKE[how](block + key, note, fine=fine if how == "drop" else (None, *fine))


MEGATRON_MODULES: Mapping[str, tuple[str, ...]] = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj"),
    "linear_proj": ("o_proj",),
    "linear_fc1": ("gate_proj", "up_proj"),
    "linear_fc2": ("down_proj",),
}
"""Megatron's layer names -> names in transformers."""
ALL_LINEAR = ("all-linear", "all")
"""Other trainers' names for all linear layers, which is RLRun's default."""
