"""Conversions of single values, by name for the tables. A ValueError contains the reason why a value has no counterpart."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any


def read_number(value: object) -> float:
    """Convert a number, or a text with a number."""
    if isinstance(value, bool):
        raise ValueError(f"got {value}, expected a number")
    try:
        found = float(str(value))
    except ValueError:
        found = math.nan
    if not math.isfinite(found):
        raise ValueError(f"got {str(value)[:40]!r}, expected a number")
    return found


def read_whole(value: object) -> int:
    """Convert a whole number, or a text such as `8` or `1e3`."""
    found = read_number(value)
    if found != int(found):
        raise ValueError(f"got {value}, expected a whole number")
    return int(found)


def read_positive(value: object) -> int | None:
    """Convert a whole number from 1; returns None for 0 and below, which mean off or unlimited in other trainers."""
    found = read_whole(value)
    return found if found > 0 else None


def read_flag(value: object) -> bool:
    """Convert true or false."""
    if isinstance(value, bool):
        return value
    raise ValueError(f"got {str(value)[:40]!r}, expected true or false")


def read_checkpointing(value: object) -> str:
    """Convert recomputation of activations: `full` or `none`."""
    return "full" if read_flag(value) else "none"


CONVERSIONS: Mapping[str, Callable[[Any], Any]] = {
    "number": read_number,
    "whole": read_whole,
    "positive": read_positive,
    "flag": read_flag,
    "checkpointing": read_checkpointing,
}
