"""Declaration of an algorithm's option: its default, its bounds and its description. Pure, without torch."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

OptionValue = bool | int | float | str | None
Options = Mapping[str, Any]
"""Keywords of an algorithm's function: a built-in one's are those of its `Entry`, of a user's own each may be any JSON value."""
Kind = Literal["advantage", "loss"]
Need = Literal["reference", "critic"]
"""Input that an objective may need besides the policy: log-probs of a reference or teacher model, values of a critic."""


@dataclass(frozen=True)
class Option:
    """One keyword of an algorithm. `choices` makes it an enumeration, a bool default a switch, else it is a number, or null if it may."""

    default: OptionValue
    summary: str
    low: float = -math.inf
    high: float = math.inf
    low_excluded: bool = False
    choices: tuple[OptionValue, ...] = ()
    needs: Need | None = None
    """Needed where the value is not 0."""
    only_with: tuple[str, OptionValue] | None = None
    """Another option and the value without which this one changes nothing: only its default is accepted then."""
    nullable: bool = False
    """None is a value too: it switches off what the option bounds."""

    def problem(self, value: object) -> str | None:
        """Reason to refuse `value`, as the end of a sentence that starts with the option's name; None if it is fine."""
        if value is None:
            return (
                None
                if self.nullable
                else f"must not be null; leave it out for the default ({json.dumps(self.default)})"
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
    """One named algorithm: its options, and the optional inputs that it reads (the others are accepted and unused).

    `ordered` names pairs of options of which the first must not exceed the second.
    """

    summary: str
    options: Mapping[str, Option] = field(default_factory=dict)
    reads: tuple[str, ...] = ()
    ordered: tuple[tuple[str, str], ...] = ()
    needs: Need | None = None
    rewarded: bool = True
    """False: a loss that reads no advantages, so that rewards change nothing."""
    weighs: bool = False
    """A loss that already weighs each token by ρ, the trainer's probability over the engine's."""
    function: str | None = None
    """Function of `rlrun.algorithms.losses` behind a loss; default: the one of its name."""
    proximal: str = "inference"
    """The policy that a loss measures its trust region from, unless a run says otherwise."""
    bands: tuple[str, ...] = ()
    """Options that bound how far a ratio or probability may move before its token loses gradient."""


def _list_names(values: Iterable[object]) -> str:
    return ", ".join(repr(value) for value in values)
