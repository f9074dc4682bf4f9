"""Rows from a text file: `[how] reason`, followed by `block: key key=VALUE ...`; VALUE is a value with which the key changes nothing."""

from __future__ import annotations

import json
import re
from pathlib import Path

from rlrun.convert.tables.row import Row, dropped_row, refused_row

_GROUP = re.compile(r"\[(drop|refuse)\] (.+)")
_MAKE = {"drop": dropped_row, "refuse": refused_row}


def read_rows(name: str) -> tuple[Row, ...]:
    """Return the rows of a list next to this module.

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
    key, equals, value = word.partition("=")
    fine = (json.loads(value),) if equals else ()
    return _MAKE[how](block + key, note, fine=fine if how == "drop" else (None, *fine))
