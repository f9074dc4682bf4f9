"""Declaration of an algorithm's options: default, bounds and description. Pure, without torch."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

OptionValue = bool | int | float | str | None
Options = Mapping[str, Any]
"""Keyword arguments of an algorithm's function. The `Entry` of a built-in algorithm declares them; a user's function takes any JSON."""
Kind = Literal["advantage", "loss"]
Need = Literal["reference", "critic"]
"""Input of an objective other than the policy: log-probs of a reference or teacher model, or values of a critic."""


@dataclass(frozen=True)
class Option:
    """One keyword argument of an algorithm: an enumeration if it has `choices`, a switch if its default is a bool, otherwise a number."""

    default: OptionValue
    summary: str
    low: float = -math.inf
    high: float = math.inf
    low_excluded: bool = False
    choices: tuple[OptionValue, ...] = ()
    needs: Need | None = None
    """Input that is needed if the value is not 0."""
    only_with: tuple[str, OptionValue] | None = None
    """Another option with the value that this option needs. With other values only the default of this option is accepted."""
    nullable: bool = False
    """Whether None is allowed; it disables the bound."""

    def problem(self, value: object) -> str | None:
        """Return the reason to refuse `value`, as the rest of a sentence that starts with the option's name, or None."""
        if value is None:
            return (
                None
                if self.nullable
                else f"must not be null; remove it to use the default ({json.dumps(self.default)})"
            )
        if self.choices:
            known = any(value == choice and type(value) is type(choice) for choice in self.choices)
            return None if known else f"must be one of {_list_names(self.choices)}, got {value!r}"
        if isinstance(self.default, bool):
            return None if isinstance(value, bool) else f"must be true or false, got {value!r}"
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            return f"must be a finite number, got {value!r}"
        too_low = value <= self.low if self.low_excluded else value < self.low
        return f"must be {self._range()}, got {value!r}" if too_low or value > self.high else None

    def _range(self) -> str:
        lower = f"{'greater than' if self.low_excluded else 'at least'} {self.low:g}"
        bounds = lower if self.high == math.inf else f"{lower} and at most {self.high:g}"
        return f"{bounds}, or null" if self.nullable else bounds


@dataclass(frozen=True)
class Entry:
    """One named algorithm: its options, and the optional inputs that it reads. It accepts and ignores all other inputs.

    `ordered` has pairs of options; the first of a pair must not exceed the second.
    """

    summary: str
    options: Mapping[str, Option] = field(default_factory=dict)
    reads: tuple[str, ...] = ()
    ordered: tuple[tuple[str, str], ...] = ()
    needs: Need | None = None
    rewarded: bool = True
    """Whether the loss reads advantages. If not, rewards have no effect."""
    weighs: bool = False
    """Whether the loss already weights each token by ρ, the trainer's probability over the engine's."""
    function: str | None = None
    """Name of the function in `rlrun.algorithms.losses`. Default: the name of the loss."""
    proximal: str = "inference"
    """Default proximal policy, from which the loss measures its trust region."""
    bands: tuple[str, ...] = ()
    """Options that bound how far a ratio or probability may move before its token loses its gradient."""


def _list_names(values: Iterable[object]) -> str:
    return ", ".join(repr(value) for value in values)
