"""Lookups in the tables of algorithms: known names, complete options, inputs of an objective.

Pure checks without torch. The configuration validates manifests with them, `rlrun.algorithms` completes options with them, and the
documentation lists the tables. A test checks that the tables equal the functions' signatures.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from rlrun.config.algorithm.presets import DEFAULT_ADVANTAGE, DEFAULT_LOSS, DEFAULT_PRESET, PRESETS, Preset
from rlrun.config.algorithm.tables import (
    ADVANTAGE_ENTRIES,
    AGGREGATIONS,
    CORRECTION_OPTIONS,
    KL_KINDS,
    KL_REWARD_KINDS,
    LOSS_ENTRIES,
    PROXIMAL_METHODS,
    Entry,
    Kind,
    Need,
    Option,
    Options,
    OptionValue,
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
    """Return whether a name has the form `package.module:function`, a user's own algorithm. The role imports it later."""
    return _IMPORT_PATH.fullmatch(name) is not None


def find_entry(kind: Kind, name: str) -> Entry:
    """Return the table entry of a built-in algorithm. A ValueError for an unknown name lists the known names."""
    table = LOSS_ENTRIES if kind == "loss" else ADVANTAGE_ENTRIES
    if name not in table:
        raise ValueError(unknown_name(kind, name, table) + ", or an import path package.module:function")
    return table[name]


def find_preset(name: str) -> Preset:
    """Return the preset of a name. A ValueError for an unknown name lists the known names."""
    if name not in PRESETS:
        raise ValueError(unknown_name("preset", name, PRESETS))
    return PRESETS[name]


def complete_options(kind: Kind, name: str, given: Options) -> Options:
    """Return `given` completed with the defaults of the algorithm.

    Options of an import path are returned unchanged, because only its function defines them.

    Raises:
        ValueError: The name or an option is unknown, or a value has the wrong type or is out of range.
    """
    if is_import_path(name):
        return dict(given)
    algorithm = find_entry(kind, name)
    for option, value in given.items():
        if option not in algorithm.options:
            raise unknown_option(kind, name, option, algorithm.options)
        if problem := algorithm.options[option].find_problem(value):
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
    """Return the problem of an option that has no effect with the other options, or None."""
    for name, spec in table.items():
        if spec.only_with is None or options[name] == spec.default:
            continue
        other, value = spec.only_with
        if options[other] != value:
            return f"{name} ({options[name]}) has no effect with {other} {options[other]}; remove it or set {other} to {value}"
    return None


def unknown_option(kind: Kind, name: str, option: str, known: Iterable[str]) -> ValueError:
    """Return the error for an option that the algorithm `name` does not have."""
    return ValueError(unknown_name(f"option of {kind} {name}", option, known))


def check_known(what: str, name: str, table: Iterable[str]) -> str:
    """Return `name` if `table` contains it. A ValueError for an unknown name lists the known names."""
    if name not in (names := list(table)):
        raise ValueError(unknown_name(what, name, names))
    return name


def algorithm_inputs(kind: Kind, name: str, options: Options) -> dict[Need, str]:
    """Return inputs of an algorithm other than the policy, each with the part that needs it: `{"reference": "loss distill"}`."""
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
    """Return the default aggregation: `seq_mean_token_mean` for `masked_is` with `ratio="sequence"`, otherwise `token_mean`."""
    by_sequence = loss == "masked_is" and options.get("ratio") == "sequence"
    return "seq_mean_token_mean" if by_sequence else "token_mean"


def default_proximal(loss: str) -> str:
    """Return the default proximal policy of a loss, a key of `PROXIMAL_METHODS`."""
    return "inference" if is_import_path(loss) else find_entry("loss", loss).proximal


def proximal_problem(loss: str, proximal: str, *, corrected: bool) -> str | None:
    """Return the conflict between a proximal policy and a loss, or None.

    Args:
        loss: name of the loss, or an import path, whose function may read any input.
        proximal: proximal policy, a key of `PROXIMAL_METHODS`.
        corrected: whether there is a correction, which also reads the proximal policy.
    """
    if is_import_path(loss):
        return None
    reads = "proximal_logprobs" in find_entry("loss", loss).reads
    if loss == "decoupled_ppo" and proximal == "inference":
        return "proximal (inference) is the policy that loss decoupled_ppo decouples from; use recompute or log_linear"
    if proximal == "inference" or reads or corrected:
        return None
    readers = ", ".join(name for name, entry in LOSS_ENTRIES.items() if "proximal_logprobs" in entry.reads)
    return (
        f"proximal ({proximal}) is not used by loss {loss}, which compares with the engine's policy; "
        f"set it to inference, or use one of the losses {readers}"
    )


NARROW_BAND = 0.01
"""Narrowest useful band. Rounding alone exceeds narrower bands: vLLM and a bfloat16 trainer differ by 0.05 per token."""


def narrow_bands(loss: str, options: Options) -> dict[str, float]:
    """Return options of a loss that bound how far a token may move and that are below `NARROW_BAND`, with their values."""
    if is_import_path(loss):
        return {}
    complete = complete_options("loss", loss, options)
    return {name: complete[name] for name in find_entry("loss", loss).bands if complete[name] < NARROW_BAND}


def correction_problem(correction: Mapping[str, object], loss: str, *, has_proximal: bool) -> str | None:
    """Return the conflict between a complete correction and a loss, or None.

    A correction must not weight by a ratio that the loss already contains.
    """
    if correction["action"] == "none":
        return None
    clamps = correction["action"] == "clamp"
    if not (clamps or correction["weight"] != "none") or is_import_path(loss):
        return None
    own = find_entry("loss", loss)
    if not own.weighs and (has_proximal or "proximal_logprobs" not in own.reads):
        return None
    without = "" if own.weighs else " without a proximal policy"
    part, fix = (
        ("action clamp", "use action mask") if clamps else (f"weight {correction['weight']}", "set weight to none")
    )
    return f"correction: {part} would apply the ratio of trainer and engine twice, because loss {loss} applies it already{without}; {fix}"


def complete_correction(given: Options) -> Options:
    """Return `given` completed with the defaults of a correction.

    Raises:
        ValueError: An option is unknown or has an invalid value; the message has the option, its value and the allowed values.
    """
    for option, value in given.items():
        if option not in CORRECTION_OPTIONS:
            raise ValueError(unknown_name("option of a correction", option, CORRECTION_OPTIONS))
        if problem := CORRECTION_OPTIONS[option].find_problem(value):
            raise ValueError(f"correction: {option} {problem}")
    options: Options = {name: spec.default for name, spec in CORRECTION_OPTIONS.items()} | dict(given)
    if options["action"] == "none":
        for option, value in options.items():
            if option != "action" and value != CORRECTION_OPTIONS[option].default:
                raise ValueError(f"correction: {option} ({value}) has no effect with action none; remove it")
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
            f"correction: action clamp needs measure ratio, got {options['measure']}, which is not a weight; set action to mask"
        )
    if options["weight"] != "none" and options["action"] == "clamp":
        raise ValueError(
            f"correction: weight ({options['weight']}) needs action mask, because clamp weights already; remove weight or set action: mask"
        )
    if options["weight"] == "none" and given.get("cap") is not None:
        raise ValueError(f"correction: cap ({options['cap']}) needs a weight; set weight to token or sequence")
    return options
