"""Conversions of one value that the tables name. A ValueError says why a value has no counterpart."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any


def number(value: object) -> float:
    """A number, also one that is written as text."""
    if isinstance(value, bool):
        raise ValueError(f"got {value}, expected a number")
    try:
        found = float(str(value))
    except ValueError:
        found = math.nan
    if not math.isfinite(found):
        raise ValueError(f"got {str(value)[:40]!r}, expected a number")
    return found


def whole(value: object) -> int:
    """A whole number, also one that is written as text or as `1e3`."""
    found = number(value)
    if found != int(found):
        raise ValueError(f"got {value}, expected a whole number")
    return int(found)


def positive(value: object) -> int | None:
    """A whole number from 1; 0 and below, which mean off or all there, are None."""
    found = whole(value)
    return found if found > 0 else None


def flag(value: object) -> bool:
    """True or false."""
    if isinstance(value, bool):
        return value
    raise ValueError(f"got {str(value)[:40]!r}, expected true or false")


def checkpointing(value: object) -> str:
    """Recomputation of activations: all of a layer, or none."""
    return "full" if flag(value) else "none"


CONVERSIONS: Mapping[str, Callable[[Any], Any]] = {
    "number": number,
    "whole": whole,
    "positive": positive,
    "flag": flag,
    "checkpointing": checkpointing,
}
