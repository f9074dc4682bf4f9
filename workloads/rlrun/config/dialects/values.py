"""Kinds of another project's values, and their form in messages."""

from __future__ import annotations

from typing import TypeGuard

ALL_TASKS = 1_000_000
"""Most tasks of an evaluation: all that there are."""
_NOTHING = (None, "None", "none", "null")


def is_nothing(value: object) -> bool:
    """True for a value that stands for none."""
    return value is None or (isinstance(value, str) and value in _NOTHING)


def is_number(value: object) -> TypeGuard[int | float]:
    """True for a number; a boolean is none."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_count(value: object) -> TypeGuard[int]:
    """True for a whole number from 1."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def show_value(value: object) -> str:
    """A value for a message, cut where it is long."""
    text = repr(value)
    return text if len(text) <= 60 else text[:60] + "…"
