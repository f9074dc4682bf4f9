"""Values of options and variables: which words of a command line are a value, and how a field reads their text."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlrun.config.loading.files import FORMATS
from rlrun.config.loading.schema import Shape

_NUMBERS = (Shape("int"), Shape("float"))
_PLAIN = ("str", "int", "float", "choice")
_TRUE, _FALSE = ("true", "1", "yes", "on"), ("false", "0", "no", "off")


def parse_value(text: str, shape: Shape) -> Any:
    """Parse `text` for a field of this shape. Unparsable text is returned unchanged, and the model refuses it."""
    word = text.lower()
    if shape.nullable and (word == "null" or (word == "none" and shape.kind != "str")):
        return None
    if shape.kind == "bool" and word in _TRUE + _FALSE:
        return word in _TRUE
    if shape.kind == "int" and re.fullmatch(r"[-+]?\d{1,4000}", text, re.ASCII):
        return int(text)
    if shape.kind == "float" and re.fullmatch(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?", text, re.ASCII):
        return float(text)
    if shape.kind in ("str", "bool", "int", "float") or text in shape.choices:
        return text
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = text
    is_item = shape.kind == "list" and shape.parts[0].kind in _PLAIN and not isinstance(value, list | dict | None)
    return _as_list(text, shape.parts[0]) if is_item and text else value


def _as_list(text: str, item: Shape) -> list[object]:
    """Return a text as a list with one item. Numbers may be separated by commas."""
    words = text.split(",") if item.kind in ("int", "float") else [text]
    return [parse_value(word.strip() if len(words) > 1 else word, item) for word in words]


def has_value(rest: Sequence[str]) -> bool:
    """Return whether the next word is neither an option nor a file."""
    return bool(rest) and not rest[0].startswith(("--", "@"))


def take_value(rest: list[str], shape: Shape) -> object:
    """Take the words after an option that are its value. A flag and a table need no value."""
    if shape.kind == "bool":
        return rest.pop(0).lower() in _TRUE if has_value(rest) and rest[0].lower() in _TRUE + _FALSE else True
    if not has_value(rest):
        return {}
    several = take_values(rest) if shape.kind == "list" else [rest.pop(0)]
    if len(several) == 1:
        return parse_value(several[0], shape)
    return [parse_value(word, shape.parts[0]) for word in several]


def take_values(rest: list[str]) -> list[str]:
    """Take the values of an option: the words up to the next option or file. The first word may be the name of a file."""
    count = 0
    while count < len(rest) and not rest[count].startswith(("--", "@")):
        if count and Path(rest[count]).suffix in FORMATS:
            break
        count += 1
    taken, rest[:count] = rest[:count], []
    return taken


def parse_plain(text: str) -> object:
    """Parse a text without knowing its field."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    if text in ("None", "none", "null"):
        return None
    for shape in _NUMBERS:
        if not isinstance(value := parse_value(text, shape), str):
            return value
    return parse_value(text, Shape("any")) if text[:1] in ("[", "{", '"') else text


def broken_json(text: str) -> str | None:
    """Return why a text that starts like a JSON object or list is invalid, or None."""
    if not text.startswith(("{", "[")):
        return None
    try:
        json.loads(text)
    except json.JSONDecodeError as error:
        return f"{error.msg} at character {error.pos + 1}"
    except (ValueError, RecursionError):
        return "a number is too long, or it is nested too deeply"
    return None
