"""Names, options, defaults and bounds of every advantage and policy loss, and the presets made of them.

Pure data and pure checks, without torch: the configuration validates a manifest with it, `rlrun.algorithms` calls
its functions with it, the documentation lists it. A test keeps it equal to the functions' signatures.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from rlrun.config.suggest import unknown_name

OptionValue = bool | int | float | str
Kind = Literal["advantage", "loss"]

DEFAULT_ADVANTAGE = "grpo"
DEFAULT_LOSS = "aipo"

_IMPORT_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


@dataclass(frozen=True)
class Option:
    """One keyword of an algorithm. `choices` makes it an enumeration, a bool default a switch, else it is a number."""

    default: OptionValue
    summary: str
    low: float = -math.inf
    high: float = math.inf
    low_excluded: bool = False
    choices: tuple[OptionValue, ...] = ()

    def problem(self, value: object) -> str | None:
        """Why `value` is refused, as the end of a sentence that starts with the option's name; None if it is fine."""
        if self.choices:
            known = any(value == choice and type(value) is type(choice) for choice in self.choices)
            return None if known else f"must be one of {_listed(self.choices)}, got {value!r}"
        if isinstance(self.default, bool):
            return None if isinstance(value, bool) else f"must be true or false, got {value!r}"
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            return f"must be a finite number, got {value!r}"
        too_low = value <= self.low if self.low_excluded else value < self.low
        return f"must be {self._range()}, got {value!r}" if too_low or value > self.high else None

    def _range(self) -> str:
        lower = f"{'greater than' if self.low_excluded else 'at least'} {self.low:g}"
        return lower if self.high == math.inf else f"{lower} and at most {self.high:g}"


@dataclass(frozen=True)
class Entry:
    """One named algorithm: its options, and the optional inputs that it reads (the others are accepted and unused).

    `ordered` names pairs of options of which the first must not exceed the second.
    """

    summary: str
    options: Mapping[str, Option]
    reads: tuple[str, ...] = ()
    ordered: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Preset:
    """A named point of the grid advantage x loss. Options that are not listed have their default."""

    description: str
    advantage: str = DEFAULT_ADVANTAGE
    loss: str = DEFAULT_LOSS
    advantage_options: Mapping[str, OptionValue] = field(default_factory=dict)
    loss_options: Mapping[str, OptionValue] = field(default_factory=dict)


_EVERY_ADVANTAGE = {
    "global_std": Option(False, "divide by the unbiased standard deviation of the rewards of the whole batch, + 1e-6"),
    "neg_clipped": Option(False, "replace negative advantages by 0, last of all"),
}

ADVANTAGE_ENTRIES: Mapping[str, Entry] = {
    "grpo": Entry(
        "R - mean of the group",
        {
            "std": Option(
                "none", "group: divide by the group's unbiased standard deviation + 1e-6", choices=("none", "group")
            ),
            **_EVERY_ADVANTAGE,
        },
    ),
    "rloo": Entry("(R - mean)·G/(G-1): the mean of the other rollouts is the baseline", dict(_EVERY_ADVANTAGE)),
    "opo": Entry(
        "R - ΣR·L/ΣL: the length-weighted mean of the group is the baseline",
        {
            "leave_one_out": Option(False, "leave the rollout itself out of its baseline: (ΣRL - RL)/(ΣL - L)"),
            **_EVERY_ADVANTAGE,
        },
        reads=("lengths",),
    ),
}

LOSS_ENTRIES: Mapping[str, Entry] = {
    "aipo": Entry(
        "one-sided truncated importance sampling: -min(ρ, δ)·A",
        {"delta": Option(8.0, "cap δ of the ratio ρ", low=0.0, low_excluded=True)},
    ),
    "ppo": Entry(
        "clipped ratio to the proximal policy, with a dual clip for negative advantages",
        {
            "eps_low": Option(0.2, "the ratio is clipped from below at 1 - eps_low", low=0.0, high=1.0),
            "eps_high": Option(0.2, "the ratio is clipped from above at 1 + eps_high", low=0.0),
            "dual_clip": Option(3.0, "cap of the ratio where A < 0", low=1.0, low_excluded=True),
        },
        reads=("proximal_logprobs",),
    ),
    "dppo": Entry(
        "drop a token whose probability moved too far in the direction of its advantage; -A·ρ + kl_tau·(log ρ)²",
        {
            "mask_low": Option(0.2, "drop where A <= 0 and the probability fell by more than this", low=0.0),
            "mask_high": Option(0.2, "drop where A > 0 and the probability rose by more than this", low=0.0),
            "kl_tau": Option(1e-3, "weight of (log ρ)²", low=0.0),
        },
    ),
    "masked_is": Entry(
        "importance sampling that drops tokens and sequences of extreme ratio; -sg(ρ·coefficient)·t",
        {
            "ratio": Option(
                "token", "ratio of each token, or one of the whole sequence", choices=("token", "sequence")
            ),
            "mask_low": Option(0.125, "drop the token below this ratio", low=0.0),
            "mask_high": Option(8.0, "drop the token above this ratio", low=0.0, low_excluded=True),
            "geo_mask_low": Option(0.1, "drop the sequence below this geometric-mean ratio", low=0.0),
            "geo_mask_high": Option(
                10.0, "drop the sequence above this geometric-mean ratio", low=0.0, low_excluded=True
            ),
            "sequence_mask_high": Option(
                100.0, "drop the sequence if any of its ratios is above this", low=0.0, low_excluded=True
            ),
            "sequence_clip": Option(10.0, "cap of the sequence's ratio (ratio: sequence)", low=0.0, low_excluded=True),
            "adv_tau": Option(1.0, "weight of the advantage", low=0.0),
            "teacher_tau": Option(0.0, "weight of ref - t, needs reference log-probs", low=0.0),
            "kl_tau": Option(0.0, "weight of -log ρ", low=0.0),
        },
        reads=("reference_logprobs",),
        ordered=(("mask_low", "mask_high"), ("geo_mask_low", "geo_mask_high")),
    ),
    "gspo": Entry(
        "clipped ratio of the whole sequence, with a gradient per token",
        {
            "eps_low": Option(3e-4, "the sequence's ratio is clipped from below at 1 - eps_low", low=0.0, high=1.0),
            "eps_high": Option(4e-4, "the sequence's ratio is clipped from above at 1 + eps_high", low=0.0),
        },
        reads=("proximal_logprobs",),
    ),
    "cispo": Entry(
        "clipped importance weight times A·t: the gradient stays where the weight is clipped",
        {
            "eps_low": Option(
                1.0, "the weight is clipped from below at 1 - eps_low; 1 means no bound", low=0.0, high=1.0
            ),
            "eps_high": Option(5.0, "the weight is clipped from above at 1 + eps_high", low=0.0),
        },
    ),
}

PRESETS: Mapping[str, Preset] = {
    "grpo": Preset("group-mean baseline without std, truncated importance sampling: the default"),
    "rloo": Preset("leave-one-out baseline, truncated importance sampling", advantage="rloo"),
    "opo": Preset("length-weighted baseline, truncated importance sampling", advantage="opo"),
    "aipo": Preset("truncated importance sampling (LlamaRL) on group-mean advantages", loss="aipo"),
    "ppo": Preset("clipped ratio with dual clip on group-mean advantages, no critic", loss="ppo"),
    "gspo": Preset("clipped sequence ratio on group-mean advantages", loss="gspo"),
    "cispo": Preset("clipped importance weights on group-mean advantages", loss="cispo"),
    "masked_is": Preset("importance sampling with token and sequence masks (PRIME-RL v0.3)", loss="masked_is"),
    "dppo": Preset("trust region on probability differences (PRIME-RL)", loss="dppo"),
}


def is_import_path(name: str) -> bool:
    """True for `package.module:function`, a user's own algorithm; whether it imports is for the role to find out."""
    return _IMPORT_PATH.fullmatch(name) is not None


def entry(kind: Kind, name: str) -> Entry:
    """The table's entry of a built-in algorithm. Raises ValueError that lists the known names."""
    table = LOSS_ENTRIES if kind == "loss" else ADVANTAGE_ENTRIES
    if name not in table:
        raise ValueError(unknown_name(kind, name, table) + ", or an import path package.module:function")
    return table[name]


def preset(name: str) -> Preset:
    """The preset of that name. Raises ValueError that lists the known names."""
    if name not in PRESETS:
        raise ValueError(unknown_name("preset", name, PRESETS))
    return PRESETS[name]


def complete_options(kind: Kind, name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """`given` with the defaults of the algorithm filled in.

    Options of an import path are returned as they are: only its function knows them.
    Raises ValueError for an unknown name, an unknown option, and a value of the wrong type or out of its range.
    """
    if is_import_path(name):
        return dict(given)
    algorithm = entry(kind, name)
    for option, value in given.items():
        if option not in algorithm.options:
            raise unknown_option(kind, name, option, algorithm.options)
        if problem := algorithm.options[option].problem(value):
            raise ValueError(f"{kind} {name}: {option} {problem}")
    options: dict[str, Any] = {option: spec.default for option, spec in algorithm.options.items()} | dict(given)
    for low, high in algorithm.ordered:
        if options[low] > options[high]:
            raise ValueError(f"{kind} {name}: {low} ({options[low]}) must not exceed {high} ({options[high]})")
    if options.get("global_std") and options.get("std") == "group":
        raise ValueError(f"{kind} {name}: std and global_std both divide by a standard deviation, choose one")
    return options


def unknown_option(kind: Kind, name: str, option: str, known: Iterable[str]) -> ValueError:
    """The error for an option that the algorithm `name` does not take."""
    return ValueError(unknown_name(f"option of {kind} {name}", option, known))


def _listed(values: Iterable[object]) -> str:
    return ", ".join(repr(value) for value in values)
