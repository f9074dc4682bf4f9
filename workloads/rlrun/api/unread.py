"""Refusal of fields that a run's task never reads but its manifest sets.

What the API server fills in is not refused: it cannot be distinguished from an unset field.
"""

from __future__ import annotations

from collections.abc import Iterable

from rlrun.config.base import Config

Parts = Iterable[tuple[str, Config, Iterable[str]]]
"""Path of a block, the block, and its fields that the task does not read."""


def refuse_set_field(parts: Parts, whose: str, hints: dict[str, str] | None = None) -> None:
    """Refuse the first field that is not at its default.

    Args:
        parts: what is not read.
        whose: owner of the fields, as the end of `is for ...`.
        hints: what to do instead, by path.

    Raises:
        ValueError: names the field, its value, and the fix.
    """
    for block, given, names in parts:
        for name in names:
            info = type(given).model_fields[name]
            value = getattr(given, name)
            if value != info.get_default(call_default_factory=True):
                path = f"{block}.{info.alias}".lstrip(".")
                hint = (hints or {}).get(path, "")
                raise ValueError(f"{path} ({value}) is for {whose}; remove it{hint}")
