"""Refusal of fields that are set but that the run's task ignores.

A field at its default is not refused: it cannot be distinguished from an unset field.
"""

from __future__ import annotations

from collections.abc import Iterable

from rlrun.config.base import Config

Parts = Iterable[tuple[str, Config, Iterable[str]]]
"""Path of a block, the block, and its fields that the task ignores."""


def refuse_set_field(parts: Parts, owner: str, hints: dict[str, str] | None = None) -> None:
    """Refuse the first field that is not at its default.

    Args:
        parts: ignored fields.
        owner: what the fields apply to, as the end of "applies only to ...".
        hints: alternatives, by path.

    Raises:
        ValueError: The message has field, value and fix.
    """
    for block, given, names in parts:
        for name in names:
            info = type(given).model_fields[name]
            value = getattr(given, name)
            if value != info.get_default(call_default_factory=True):
                path = f"{block}.{info.alias}".lstrip(".")
                hint = (hints or {}).get(path, "")
                raise ValueError(f"{path} ({value}) applies only to {owner}; remove it{hint}")
