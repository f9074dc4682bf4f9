"""Look-ups in the tables of algorithms: known names, complete options, what an objective needs.

Pure checks without torch: the configuration validates a manifest with them, `rlrun.algorithms` calls its functions with them, the
documentation lists the tables. A test keeps them equal to the functions' signatures.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from rlrun.config.algorithm.options import Entry, Kind, Need, Option, Options, OptionValue
from rlrun.config.algorithm.presets import DEFAULT_ADVANTAGE, DEFAULT_LOSS, DEFAULT_PRESET, PRESETS, Preset
from rlrun.config.algorithm.tables import (
    ADVANTAGE_ENTRIES,
    AGGREGATIONS,
    CORRECTION_OPTIONS,
    KL_KINDS,
    KL_REWARD_KINDS,
    LOSS_ENTRIES,
    PROXIMAL_METHODS,
)
from rlrun.config.suggest import unknown_name

__all__ = [
    "ADVANTAGE_ENTRIES",
    "AGGREGATIONS",
    "CORRECTION_OPTIONS",
    "DEFAULT_ADVANTAGE",
    "DEFAULT_LOSS",
    "DEFAULT_PRESET",
    "KL_KINDS",
    "KL_REWARD_KINDS",
    "LOSS_ENTRIES",
    "NARROW_BAND",
    "PRESETS",
    "PROXIMAL_METHODS",
    "Entry",
    "Kind",
    "Need",
    "Option",
    "OptionValue",
    "Options",
    "Preset",
    "algorithm_inputs",
    "check_known",
    "complete_correction",
    "complete_options",
    "correction_problem",
    "default_aggregation",
    "default_proximal",
    "find_entry",
    "find_preset",
    "is_import_path",
    "narrow_bands",
    "proximal_problem",
    "unknown_option",
]

_IMPORT_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


def is_import_path(name: str) -> bool:
    """True for `package.module:function`, a user's own algorithm; whether it imports is for the role to find out."""
    return _IMPORT_PATH.fullmatch(name) is not None


def find_entry(kind: Kind, name: str) -> Entry:
    """The table's entry of a built-in algorithm. Raises ValueError that lists the known names."""
    table = LOSS_ENTRIES if kind == "loss" else ADVANTAGE_ENTRIES
    if name not in table:
        raise ValueError(unknown_name(kind, name, table) + ", or an import path package.module:function")
    return table[name]


def find_preset(name: str) -> Preset:
    """The preset of that name. Raises ValueError that lists the known names."""
    if name not in PRESETS:
        raise ValueError(unknown_name("preset", name, PRESETS))
    return PRESETS[name]


def complete_options(kind: Kind, name: str, given: Options) -> Options:
    """`given` with the defaults of the algorithm filled in.

    Options of an import path are returned as they are: only its function knows them.
    Raises ValueError for an unknown name, an unknown option, and a value of the wrong type or out of its range.
    """
    if is_import_path(name):
        return dict(given)
    algorithm = find_entry(kind, name)
    for option, value in given.items():
        if option not in algorithm.options:
            raise unknown_option(kind, name, option, algorithm.options)
        if problem := algorithm.options[option].problem(value):
            raise ValueError(f"{kind} {name}: {option} {problem}")
    options: Options = {option: spec.default for option, spec in algorithm.options.items()} | dict(given)
    for low, high in algorithm.ordered:
        if options[low] > options[high]:
            raise ValueError(f"{kind} {name}: {low} ({options[low]}) must not exceed {high} ({options[high]})")
    if problem := _unused_option(algorithm.options, options):
        raise ValueError(f"{kind} {name}: {problem}")
    if options.get("cap_mode") == "mask" and options["cap"] is None:
        raise ValueError(f"{kind} {name}: cap_mode (mask) needs a cap, and cap is null; set cap, or remove cap_mode")
    if options.get("global_std") and options.get("std", "none") != "none":
        raise ValueError(f"{kind} {name}: std and global_std both divide by a standard deviation, choose one")
    return options


def _unused_option(table: Mapping[str, Option], options: Options) -> str | None:
    """Problem of an option that changes nothing beside the others, or None."""
    for name, spec in table.items():
        if spec.only_with is None or options[name] == spec.default:
            continue
        other, value = spec.only_with
        if options[other] != value:
            return f"{name} ({options[name]}) changes nothing with {other} {options[other]}; remove it or set {other} to {value}"
    return None


def unknown_option(kind: Kind, name: str, option: str, known: Iterable[str]) -> ValueError:
    """The error for an option that the algorithm `name` does not take."""
    return ValueError(unknown_name(f"option of {kind} {name}", option, known))


def check_known(what: str, name: str, table: Iterable[str]) -> str:
    """`name`, if `table` has it. Raises ValueError that lists the known names."""
    if name not in (names := list(table)):
        raise ValueError(unknown_name(what, name, names))
    return name


def algorithm_inputs(kind: Kind, name: str, options: Options) -> dict[Need, str]:
    """Inputs of an algorithm besides the policy, each with the part that needs it: `{"reference": "loss distill"}`."""
    if is_import_path(name):
        return {}
    algorithm = find_entry(kind, name)
    found: dict[Need, str] = {algorithm.needs: f"{kind} {name}"} if algorithm.needs else {}
    for option, value in complete_options(kind, name, options).items():
        need = algorithm.options[option].needs
        if need is not None and value:
            found.setdefault(need, f"{option} ({value}) of {kind} {name}")
    return found


def default_aggregation(loss: str, options: Mapping[str, object]) -> str:
    """`token_mean`; for `masked_is` with `ratio="sequence"` `seq_mean_token_mean`."""
    by_sequence = loss == "masked_is" and options.get("ratio") == "sequence"
    return "seq_mean_token_mean" if by_sequence else "token_mean"


def default_proximal(loss: str) -> str:
    """The proximal policy of a loss, a key of `PROXIMAL_METHODS`."""
    return "inference" if is_import_path(loss) else find_entry("loss", loss).proximal


def proximal_problem(loss: str, proximal: str, *, corrected: bool) -> str | None:
    """Conflict of a proximal policy with a loss, or None.

    Args:
        loss: name of the loss, or an import path, whose function may read any input.
        proximal: a key of `PROXIMAL_METHODS`.
        corrected: whether a correction, which reads the proximal policy too, is set.
    """
    if is_import_path(loss):
        return None
    reads = "proximal_logprobs" in find_entry("loss", loss).reads
    if loss == "decoupled_ppo" and proximal == "inference":
        return "proximal (inference) leaves loss decoupled_ppo nothing to decouple; use recompute or log_linear"
    if proximal == "inference" or reads or corrected:
        return None
    readers = ", ".join(name for name, one in LOSS_ENTRIES.items() if "proximal_logprobs" in one.reads)
    return (
        f"proximal ({proximal}) is not used by loss {loss}, which measures from the engine's policy; "
        f"set it to inference, or choose one of the losses {readers}"
    )


NARROW_BAND = 0.01
"""Bands below this are narrower than the rounding of engine and trainer: vLLM against a bfloat16 trainer differs by 0.05 a token."""


def narrow_bands(loss: str, options: Options) -> dict[str, float]:
    """Options of a loss that bound how far a token may move, and that are below `NARROW_BAND`, with their values."""
    if is_import_path(loss):
        return {}
    complete = complete_options("loss", loss, options)
    return {name: complete[name] for name in find_entry("loss", loss).bands if complete[name] < NARROW_BAND}


def correction_problem(correction: Mapping[str, object], loss: str, *, has_proximal: bool) -> str | None:
    """Conflict of a complete correction with a loss: weights on top of a loss that has the same ratio already."""
    if correction["action"] == "none":
        return None
    clamps = correction["action"] == "clamp"
    if not (clamps or correction["weight"] != "none") or is_import_path(loss):
        return None
    own = find_entry("loss", loss)
    if not own.weighs and (has_proximal or "proximal_logprobs" not in own.reads):
        return None
    without = "" if own.weighs else " without a proximal policy"
    what, fix = (
        ("action clamp", "use action mask") if clamps else (f"weight {correction['weight']}", "set weight to none")
    )
    return f"correction: {what} would weigh twice by the ratio of trainer and engine: loss {loss} does so already{without}; {fix}"


def complete_correction(given: Options) -> Options:
    """`given` with the defaults of a correction filled in. Raises ValueError that names the option, its value and what is allowed."""
    for option, value in given.items():
        if option not in CORRECTION_OPTIONS:
            raise ValueError(unknown_name("option of a correction", option, CORRECTION_OPTIONS))
        if problem := CORRECTION_OPTIONS[option].problem(value):
            raise ValueError(f"correction: {option} {problem}")
    options: Options = {name: spec.default for name, spec in CORRECTION_OPTIONS.items()} | dict(given)
    if options["action"] == "none":
        for option, value in options.items():
            if option != "action" and value != CORRECTION_OPTIONS[option].default:
                raise ValueError(f"correction: {option} ({value}) has no meaning for action none; remove it")
        return options
    if problem := _unused_option(CORRECTION_OPTIONS, options):
        raise ValueError(f"correction: {problem}")
    if options["measure"] == "k1" and "low" not in given:
        options = {**options, "low": -options["high"]}
    if options["low"] > options["high"]:
        raise ValueError(
            f"correction: low ({options['low']}) must be at most high ({options['high']}); lower low or raise high"
        )
    if options["measure"] == "ratio" and options["low"] < 0:
        raise ValueError(f"correction: low ({options['low']}) must be at least 0 for measure ratio")
    if options["action"] == "clamp" and options["measure"] != "ratio":
        raise ValueError(
            f"correction: action clamp needs measure ratio, got {options['measure']}: a divergence is no weight; use action mask"
        )
    if options["weight"] != "none" and options["action"] == "clamp":
        raise ValueError(
            f"correction: weight ({options['weight']}) needs action mask: action clamp weighs already; set one of them"
        )
    if options["weight"] == "none" and given.get("cap") is not None:
        raise ValueError(f"correction: cap ({options['cap']}) needs a weight; set weight to token or sequence")
    return options
