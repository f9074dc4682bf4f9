"""Checks of another project's values, and their form in messages."""

from __future__ import annotations

from typing import TypeGuard

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
