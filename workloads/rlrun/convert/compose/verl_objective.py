"""Objective of verl's settings: advantage, loss, aggregation, KL, filters, correction and scales of rewards.

The scale of verl's rewards depends on the `data_source` of a row. The first part converts the penalty of long answers to RLRun's scale, and
reports scores that differ from RLRun's rewards.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from rlrun.config.algorithm.presets import PRESETS
from rlrun.config.algorithm.tables import LOSS_ENTRIES
from rlrun.convert.compose.shared_parts import file_list
from rlrun.convert.draft import Draft
from rlrun.convert.tables.verl_keys import (
    ADVANTAGES,
    AGGREGATIONS,
    KL_KINDS,
    KL_REWARD_KINDS,
    LOSSES,
    NO_ADVANTAGE,
    NO_KL_KIND,
    NO_LOSS,
    NO_REJECTION,
    REJECTIONS,
)

_SIGNED = re.compile(r"(?i)(?<![a-z])(dapo|aime)")
"""File names of data whose rows have the `data_source` math_dapo or aime..."""
_OVERLONG = "reward_model.overlong_buffer."
_INVARIANT = ("grpo", "reinforce_pp")
"""Advantages that are divided by a standard deviation of the rewards, so that a scale does not matter."""


def is_signed(draft: Draft) -> bool:
    """Return whether verl's rewards are -1 and 1 for rows whose rewards in the environment `dataset` are 0 and 1."""
    own = draft.has_value("custom_reward_function.path") or draft.get_flag("reward_model.enable")
    files = file_list(draft.get("data.train_files"))
    return not own and any(_SIGNED.search(file.rpartition("/")[2]) for file in files)


def put_overlong_penalty(draft: Draft) -> None:
    """Set the penalty of long answers, on the scale of RLRun's rewards."""
    enabled, length, factor = (_OVERLONG + name for name in ("enable", "len", "penalty_factor"))
    if not draft.get_flag(enabled):
        return
    answer = draft.fields["sampling.maxTokens"].value
    share = min(1.0, (draft.get_integer(length) or answer // 5) / answer)
    penalty = draft.get_number(factor)
    note = ""
    if is_signed(draft) and penalty is not None:
        penalty, note = penalty / 2, "half: these rows have rewards 0 and 1 in RLRun, -1 and 1 in verl"
        draft.notices.append(
            f"{factor}={draft.get_number(factor):g}: {penalty:g} in RLRun, because rows with data_source math_dapo and aime... have "
            "rewards -1 and 1 in verl, but 0 and 1 with args.reward: math"
        )
    elif not draft.has_value("custom_reward_function.path"):
        draft.notices.append(
            f"{factor}={penalty:g}: if data_source of the rows is math_dapo or aime..., verl's rewards are -1 and 1, and the "
            f"same penalty is algorithm.filters.overlongPenalty: {(penalty or 0.0) / 2:g}"
        )
    draft.set_field("algorithm.filters.overlongPenalty", penalty, enabled, factor, note=note)
    draft.set_field("algorithm.filters.overlongBuffer", round(share, 6), length, note=f"share of {answer} tokens")


def note_scores(draft: Draft) -> None:
    """Add a notice if verl's own scores differ from the reward `math`."""
    if draft.has_value("custom_reward_function.path") or draft.get_flag("reward_model.enable"):
        return
    draft.notices.append(
        "rewards: verl chooses a score by data_source of each row; RLRun compares all rows as mathematics: "
        "args.reward_by_source of the environment selects others (docs/environments.md)"
    )
    advantage = draft.fields.get("algorithm.advantage")
    options = advantage.value.get("options", {}) if advantage is not None else {}
    name = advantage.value["name"] if advantage is not None else draft.fields["algorithm.preset"].value
    if is_signed(draft) and (not str(name).startswith(("dapo", *_INVARIANT)) or options.get("std") == "none"):
        draft.notices.append(
            "rewards: rows with data_source math_dapo and aime... have rewards -1 and 1 in verl, 0 and 1 in RLRun: advantages are "
            "half as large, which matters with a KL term, an entropy bonus or gradient clipping"
        )
    metric = "algorithm.filter_groups.metric"
    if (
        draft.get_flag("algorithm.filter_groups.enable")
        and draft.get_flag(_OVERLONG + "enable")
        and draft.get(metric) in ("seq_reward", "seq_final_reward", "score")
    ):
        draft.notices.append(
            f"{metric}={draft.get(metric)}: RLRun compares groups by the environment's rewards, before the penalty of long answers"
        )


_A = "actor_rollout_ref.actor."
_MODE, _ESTIMATOR = _A + "policy_loss.loss_mode", "algorithm.adv_estimator"
_IS, _RS = "algorithm.rollout_correction.rollout_is", "algorithm.rollout_correction.rollout_rs"
_FILTER = "algorithm.filter_groups.enable"


_NO_CAP = 100.0
"""A ratio cap that no token reaches: DPPO drops tokens long before, by the change of their probability."""


def put_objective(draft: Draft) -> None:
    """Set the fields of `algorithm`."""
    estimator, mode = str(draft.get(_ESTIMATOR)), str(draft.get(_MODE))
    if estimator not in ADVANTAGES:
        draft.refused[_ESTIMATOR] = (
            f"unsupported advantage: {NO_ADVANTAGE.get(estimator, 'known: ' + ', '.join(ADVANTAGES))}"
        )
        estimator = "grpo"
    if mode not in LOSSES:
        draft.refused[_MODE] = f"unsupported loss: {NO_LOSS.get(mode, 'known: ' + ', '.join(LOSSES))}"
        mode = "vanilla"
    _choose_preset(draft, estimator, mode)
    _compose_advantage(draft, estimator)
    _compose_loss(draft, mode)
    _compose_aggregation(draft, mode)
    _compose_kl(draft)
    _compose_filters(draft)
    _compose_correction(draft, mode)
    draft.set_field("algorithm.maxAsyncLevel", 0, note="verl's main_ppo waits for each step")
    draft.set_field("algorithm.maxOffPolicySteps", 0, note="every sample is of the newest version")


def _choose_preset(draft: Draft, estimator: str, mode: str) -> None:
    of_loss = LOSSES[mode][1]
    filtered = draft.get_flag(_FILTER) and estimator == "grpo" and of_loss is None
    name = "dapo" if filtered else of_loss or ADVANTAGES[estimator][0]
    causes = [_ESTIMATOR, *([_MODE] if of_loss else []), *([_FILTER] if filtered else [])]
    draft.set_field("algorithm.preset", name, *causes)


def _compose_advantage(draft: Draft, estimator: str) -> None:
    name = ADVANTAGES[estimator][1]
    options: dict[str, object] = {}
    causes = [_ESTIMATOR]
    if name == "grpo":
        options["std"] = "group" if draft.get_flag("algorithm.norm_adv_by_std_in_grpo") else "none"
        causes.append("algorithm.norm_adv_by_std_in_grpo")
    if name in ("gae", "reinforce_pp"):
        options["gamma"] = draft.get_number("algorithm.gamma")
        causes.append("algorithm.gamma")
    if name == "gae":
        options["lam"] = draft.get_number("algorithm.lam")
        options["bootstrap"] = False  # verl's value after the last token is 0, even for a truncated answer
        causes.append("algorithm.lam")
        draft.set_field("algorithm.critic.lr", draft.get_number("critic.optim.lr"), "critic.optim.lr")
        draft.set_field(
            "algorithm.critic.valueClip", draft.get_number("critic.cliprange_value"), "critic.cliprange_value"
        )
    settings = PRESETS[draft.fields["algorithm.preset"].value]
    if settings.advantage != name or dict(settings.advantage_options) != options:
        value = {"name": name, "options": options} if options else {"name": name}
        draft.set_field("algorithm.advantage", value, *causes)
    elif draft.has_value("algorithm.norm_adv_by_std_in_grpo") and name == "grpo":
        draft.dropped["algorithm.norm_adv_by_std_in_grpo"] = (
            f"same as the preset {draft.fields['algorithm.preset'].value}"
        )


def _compose_loss(draft: Draft, mode: str) -> None:
    name = LOSSES[mode][0]
    low, high = _clip_bound(draft, "low"), _clip_bound(draft, "high")
    causes = [*low[1], *high[1], *([_MODE] if draft.has_value(_MODE) else [])]
    if name == "sapo":
        options: dict[str, object] = {
            f"tau_{ours}": draft.get_number(_A + f"tau_{theirs}") or default for ours, theirs, default in _TAU
        }
        causes = [_MODE, *(_A + f"tau_{theirs}" for _, theirs, _ in _TAU if draft.has_value(_A + f"tau_{theirs}"))]
    elif name == "dppo":
        options = {"mask_low": low[0], "mask_high": high[0], "kl_tau": 0.0}  # verl's loss has no such term
        if (cap := draft.get_number(_A + "clip_ratio_c") or 0.0) < _NO_CAP:
            draft.notices.append(f"{_A}clip_ratio_c={cap:g}: RLRun's loss dppo does not cap the ratio")
    else:
        options = {"eps_low": min(1.0, low[0]), "eps_high": high[0]}
    if name == "ppo":
        dual = draft.get_number(_A + "clip_ratio_c")
        options["dual_clip"] = dual
        causes.append(_A + "clip_ratio_c")
    draft.set_field("algorithm.loss", {"name": name, "options": options}, *dict.fromkeys(causes))


_TAU = (("positive", "pos", 1.0), ("negative", "neg", 1.05))


def _clip_bound(draft: Draft, side: str) -> tuple[float, list[str]]:
    """Return the bound of one side and its keys: `clip_ratio_low|high`, otherwise `clip_ratio`."""
    own = _A + f"clip_ratio_{side}"
    key = own if draft.has_value(own) else _A + "clip_ratio"
    return draft.get_number(key) or 0.2, [key]


def _compose_aggregation(draft: Draft, mode: str) -> None:
    key, old = _A + "loss_agg_mode", _A + "use_token_level_loss"
    wanted = str(draft.get(key))
    if not draft.has_value(key) and draft.has_value(old):
        draft.set_field("algorithm.aggregation", "token_mean" if draft.get_flag(old) else "seq_mean_token_mean", old)
        return
    if not draft.has_value(key) and mode == "gspo":
        draft.set_field("algorithm.aggregation", "seq_mean_token_mean", _MODE, note="like GSPO's loss in verl")
        return
    if wanted not in AGGREGATIONS:
        draft.refused[key] = f"known: {', '.join(AGGREGATIONS)}"
        return
    draft.set_field("algorithm.aggregation", AGGREGATIONS[wanted], key)
    if AGGREGATIONS[wanted] == "constant_length":
        scale = _A + "loss_scale_factor"
        length = draft.get_integer(scale) or draft.fields["sampling.maxTokens"].value
        draft.set_field(
            "algorithm.aggregationLength", length, scale if draft.has_value(scale) else "data.max_response_length"
        )


def _compose_kl(draft: Draft) -> None:
    if (entropy := draft.get_number(_A + "entropy_coeff") or 0.0) > 0:
        draft.set_field("algorithm.regularizers.entropy", entropy, _A + "entropy_coeff")
    use, weight, kind = _A + "use_kl_loss", _A + "kl_loss_coef", _A + "kl_loss_type"
    in_reward, coefficient = "algorithm.use_kl_in_reward", "algorithm.kl_ctrl.kl_coef"
    penalty = "algorithm.kl_penalty"
    has_loss = draft.get_flag(use) and (draft.get_number(weight) or 0.0) > 0
    has_reward = draft.get_flag(in_reward) and (draft.get_number(coefficient) or 0.0) > 0
    if has_loss:
        draft.set_field("algorithm.regularizers.kl", draft.get_number(weight), use, weight)
        _kl_kind(draft, kind, "algorithm.regularizers.klKind", KL_KINDS)
    if has_reward:
        draft.set_field("algorithm.regularizers.klReward", draft.get_number(coefficient), in_reward, coefficient)
        _kl_kind(draft, penalty, "algorithm.regularizers.klRewardKind", KL_REWARD_KINDS)
        if str(draft.get(_ESTIMATOR)) not in _PER_TOKEN:
            draft.notices.append(
                f"{in_reward}=true: RLRun adds the KL reward of later tokens to each token's advantage, after the group's mean and "
                "standard deviation; verl adds it to the answer's reward before them"
            )
    if has_loss or has_reward:
        draft.set_field("algorithm.reference.model", "initial", note="verl's reference is the run's start")


_PER_TOKEN = ("gae", "reinforce_plus_plus")
"""Estimators whose rewards are per token in verl, too."""


def _kl_kind(draft: Draft, key: str, field: str, kinds: Mapping[str, str]) -> None:
    theirs = str(draft.get(key))
    if theirs in kinds:
        draft.set_field(field, kinds[theirs], key)
    else:
        draft.refused[key] = NO_KL_KIND.get(theirs, f"known: {', '.join(kinds)}")


def _compose_filters(draft: Draft) -> None:
    if draft.get_flag(_FILTER):
        draft.set_field("algorithm.filters.zeroVariance", True, _FILTER)
    put_overlong_penalty(draft)
    note_scores(draft)


def _compose_correction(draft: Draft, mode: str) -> None:
    proximal = LOSSES[mode][2]
    bypass = "algorithm.rollout_correction.bypass_mode"
    if proximal is not None:
        passes = draft.get_flag(bypass)
        draft.set_field(
            "algorithm.proximal",
            "inference" if passes else proximal,
            *([bypass] if draft.has_value(bypass) else []),
            note="" if passes else "verl recomputes the log-probs at the start of a step",
        )
    elif draft.get_flag(bypass):
        draft.dropped[bypass] = "this loss always uses the ratio to the engine"
    else:
        draft.notices.append(
            f"{_A}policy_loss.loss_mode={mode}: RLRun uses the engine's log-probs for the ratio; verl recomputes them at the step's start "
            "unless algorithm.rollout_correction.bypass_mode is true"
        )
    cap = _A + "tis_imp_ratio_cap"
    corrects = draft.get(_IS) in ("token", "sequence") or draft.get(_RS) is not None
    if (bound := draft.get_number(cap)) is not None and bound > 0:
        draft.set_field("algorithm.correction", {"action": "clamp", "level": "token", "high": bound}, cap)
    elif corrects:
        _rollout_correction(draft, bypasses=proximal is not None and draft.get_flag(bypass))
    elif PRESETS[draft.fields["algorithm.preset"].value].correction is not None:
        note = "verl corrects only if rollout_correction is set"
        draft.set_field("algorithm.correction", {"action": "none"}, note=note)


def _rollout_correction(draft: Draft, *, bypasses: bool) -> None:
    """Set importance weights, rejection, or both, for the ratio of the recomputed policy to the engine.

    Args:
        draft: draft of the manifest.
        bypasses: whether the loss uses the ratio to the engine, so that verl applies no further weights.
    """
    loss = draft.fields["algorithm.loss"].value["name"]
    weighs = draft.get(_IS) in ("token", "sequence")
    if weighs and (bypasses or LOSS_ENTRIES[loss].weighs):
        weighs = False
        draft.dropped[_IS] = (
            "with bypass_mode the clipped ratio is the ratio to the engine, and verl applies no further weights"
            if bypasses
            else f"the loss {loss} already applies the ratio to the engine as a weight"
        )
    limits = _read_limits(draft, _IS + "_threshold") if weighs else None
    options: dict[str, object] = {}
    causes: list[str] = []
    if weighs and limits is not None:
        causes += [_IS, _IS + "_threshold"]
        low, high = limits
        by_sequence = {"level": "sequence", "reduce": "sum"} if draft.get(_IS) == "sequence" else {"level": "token"}
        if low is None:
            options = {"action": "clamp", **by_sequence, "high": high}
        else:  # IcePop: weight = ratio inside of the bounds, 0 outside
            options = {"action": "mask", **by_sequence, "weight": draft.get(_IS), "low": low, "high": high}
    if draft.get(_RS) is not None and (rejection := _read_rejection(draft)) is not None:
        if options.get("action") == "mask":
            draft.refused[_RS] = (
                "a second rejection in addition to rollout_is_threshold; algorithm.correction supports one"
            )
            return
        causes += [_RS, *(key for key in (_RS + "_threshold", _RS + "_threshold_lower") if draft.has_value(key))]
        weight = {"weight": draft.get(_IS), "cap": options["high"]} if options else {}
        options = {"action": "mask", **rejection, **weight}
        draft.notices.append(f"{_RS}: in RLRun rejected tokens still count in the divisor of the mean")
    if options:
        draft.set_field("algorithm.correction", options, *causes)
    elif PRESETS[draft.fields["algorithm.preset"].value].correction is not None:
        draft.set_field("algorithm.correction", {"action": "none"})


def _read_rejection(draft: Draft) -> dict[str, object] | None:
    """Return level, measure and bounds of `rollout_rs`, or None if it is refused."""
    names = list(dict.fromkeys(part.strip() for part in str(draft.get(_RS)).split(",") if part.strip()))
    name = names[0] if names else ""
    if len(names) != 1:
        draft.refused[_RS] = f"{len(names)} criteria; algorithm.correction supports one: keep one of them"
        return None
    if name not in REJECTIONS:
        draft.refused[_RS] = NO_REJECTION.get(name, f"known: {', '.join(REJECTIONS)}")
        return None
    threshold, lower = _RS + "_threshold", _RS + "_threshold_lower"
    if not draft.has_value(threshold):
        draft.refused[_RS] = f"{threshold} is missing; add {threshold}=2.0"
        return None
    if (limits := _read_limits(draft, threshold)) is None:
        return None
    level, measure, reduction = REJECTIONS[name]
    low, high = limits
    if measure in ("ratio", "k1"):
        low = draft.get_number(lower) if low is None and draft.has_value(lower) else low
        low = 1.0 / high if low is None else low
        if low > high:
            draft.refused[threshold] = (
                f"{draft.get(threshold)}: the lower bound ({low:g}) is above the upper one ({high:g})"
            )
            return None
    elif low is not None:
        draft.refused[threshold] = f"{draft.get(threshold)}: {name} has only an upper bound; write {threshold}={high:g}"
        return None
    found: dict[str, object] = {"level": level, "measure": measure}
    found |= {"reduce": reduction} if level == "sequence" else {}
    if measure == "k1":  # verl bounds -log(ratio) by the logarithms
        return found | {"low": math.log(low or high), "high": math.log(high)}
    return found | ({"low": low} if low is not None else {}) | {"high": high}


def _read_limits(draft: Draft, key: str) -> tuple[float | None, float] | None:
    """Return lower (None: unset) and upper bound of a threshold `upper` or `lower_upper`, or None if it is refused."""
    written = str(draft.get(key)).strip()
    parts = written.split("_") if "_" in written else ["", written]
    try:
        low, high = (float(part) if part else None for part in parts)
    except ValueError:
        low, high = None, None
    if high is None or not math.isfinite(high) or high <= 0 or (low is not None and not 0 < low <= high):
        draft.refused[key] = f"{written} is not a positive number, or two numbers such as 0.5_5.0"
        return None
    return low, high
