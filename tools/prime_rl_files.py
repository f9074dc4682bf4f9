"""Facts about PRIME-RL's files as documents; see `prime_rl_files.txt`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class File:
    """One configuration file of the other project."""

    era: str
    command: str
    path: str
    keys: dict[str, Any]

    @property
    def document(self) -> dict[str, Any]:
        """The keys as nested tables."""
        return nested(self.keys)


def files() -> Iterator[File]:
    """Return all files."""
    text = Path(__file__).with_suffix(".txt").read_text()
    for block in text.split("\n== ")[1:]:
        head, *lines = block.strip().splitlines()
        era, command, path = head.split()
        pairs = (line.partition(" = ") for line in lines)
        yield File(era, command, path, {key: value_of(value) for key, _, value in pairs})


def value_of(text: str) -> Any:
    """Return a value in the table's form, which is JSON."""
    return json.loads(text)


def as_toml(document: Mapping[str, Any]) -> str:
    """Return a document as TOML, with a line for each key at its top."""
    return "".join(f"{json.dumps(name)} = {_inline(value)}\n" for name, value in document.items() if value is not None)


def _inline(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(name)} = {_inline(one)}" for name, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(_inline(one) for one in value) + "]"
    return json.dumps(value)


def nested(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Return dotted keys, with `[i]` for items of lists, as nested tables."""
    document: dict[str, Any] = {}
    for key, value in keys.items():
        _put(document, key, value)
    return document


def _put(document: dict[str, Any], key: str, value: Any) -> None:
    place: Any = document
    *parents, last = [int(p[1:-1]) if p[0] == "[" else p for p in re.findall(r"\[\d+\]|[^.\[\]]+", key)]
    for part, following in zip(parents, [*parents, last][1:], strict=True):
        empty: Any = [] if isinstance(following, int) else {}
        if isinstance(place, list):
            if part == len(place):
                place.append(empty)
            place = place[part]
        else:
            place = place.setdefault(part, empty)
    place[last] = value
