"""Values of a parametrized test: a few in the gate, the rest in the full set (docs/development.md)."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def few_in_gate(values: Iterable[Any], gate: Collection[Any]) -> list[Any]:
    """Return all values in their order, those outside of `gate` with the marker `full`.

    Raises:
        ValueError: `gate` has a value that is not among `values`; the gate would lose a test without notice.
    """
    all_values = list(values)
    if unknown := [value for value in gate if value not in all_values]:
        raise ValueError(f"not among the values of the test: {unknown}")
    return [value if value in gate else _in_full_set(value) for value in all_values]


def _in_full_set(value: Any) -> Any:
    values = value if isinstance(value, tuple) else (value,)
    return pytest.param(*values, marks=pytest.mark.full)
