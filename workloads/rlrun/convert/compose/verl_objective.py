"""The objective of verl's settings: advantage, loss, aggregation, KL, filters, correction."""

from __future__ import annotations

from typing import Any

from rlrun.config.algorithm.presets import PRESETS
from rlrun.convert.draft import Draft
from rlrun.convert.tables.verl import ADVANTAGES, AGGREGATIONS, KL_KINDS, LOSSES, NO_ADVANTAGE, NO_LOSS

_A = "actor_rollout_ref.actor."
_MODE, _ESTIMATOR = _A + "policy_loss.loss_mode", "algorithm.adv_estimator"
_IS = "algorithm.rollout_correction.rollout_is"
_OVERLONG, _FILTER = "reward_model.overlong_buffer.", "algorithm.filter_groups.enable"


def put_objective(draft: Draft) -> None:
    """Set `algorithm`."""
    estimator, mode = str(draft.get(_ESTIMATOR)), str(draft.get(_MODE))
    if estimator not in ADVANTAGES:
        draft.refused[_ESTIMATOR] = (
            f"no such advantage: {NO_ADVANTAGE.get(estimator, 'known: ' + ', '.join(ADVANTAGES))}"
        )
        estimator = "grpo"
    if mode not in LOSSES:
        draft.refused[_MODE] = f"no such loss: {NO_LOSS.get(mode, 'known: ' + ', '.join(LOSSES))}"
        mode = "vanilla"
    _preset(draft, estimator, mode)
    _advantage(draft, estimator)
    _loss(draft, mode)
    _aggregation(draft, mode)
    _kl(draft)
    _filters(draft)
    _correction(draft, mode)
    draft.put("algorithm.maxAsyncLevel", 0, note="verl's main_ppo waits for each step")
    draft.put("algorithm.maxOffPolicySteps", 0, note="every sample is of the newest version")


def _preset(draft: Draft, estimator: str, mode: str) -> None:
    of_loss = LOSSES[mode][1]
    filtered = draft.flag(_FILTER) and estimator == "grpo" and of_loss is None
    name = "dapo" if filtered else of_loss or ADVANTAGES[estimator][0]
    causes = [_ESTIMATOR, *([_MODE] if of_loss else []), *([_FILTER] if filtered else [])]
    draft.put("algorithm.preset", name, *causes)


def _advantage(draft: Draft, estimator: str) -> None:
    name = ADVANTAGES[estimator][1]
    options: dict[str, Any] = {}
    causes = [_ESTIMATOR]
    if name == "grpo":
        options["std"] = "group" if draft.flag("algorithm.norm_adv_by_std_in_grpo") else "none"
        causes.append("algorithm.norm_adv_by_std_in_grpo")
    if name in ("gae", "reinforce_pp"):
        options["gamma"] = draft.number("algorithm.gamma")
        causes.append("algorithm.gamma")
    if name == "gae":
        options["lam"] = draft.number("algorithm.lam")
        causes.append("algorithm.lam")
        draft.put("algorithm.critic.lr", draft.number("critic.optim.lr"), "critic.optim.lr")
        draft.put("algorithm.critic.valueClip", draft.number("critic.cliprange_value"), "critic.cliprange_value")
    settings = PRESETS[draft.fields["algorithm.preset"].value]
    if settings.advantage != name or dict(settings.advantage_options) != options:
        value = {"name": name, "options": options} if options else {"name": name}
        draft.put("algorithm.advantage", value, *causes)
    elif draft.has("algorithm.norm_adv_by_std_in_grpo") and name == "grpo":
        draft.dropped["algorithm.norm_adv_by_std_in_grpo"] = (
            f"what the preset {draft.fields['algorithm.preset'].value} does"
        )


def _loss(draft: Draft, mode: str) -> None:
    name = LOSSES[mode][0]
    low, high = _clip(draft, "low"), _clip(draft, "high")
    causes = [*low[1], *high[1], *([_MODE] if draft.has(_MODE) else [])]
    if name == "sapo":
        options: dict[str, Any] = {
            f"tau_{ours}": draft.number(_A + f"tau_{theirs}") or default for ours, theirs, default in _TAU
        }
        causes = [_MODE, *(_A + f"tau_{theirs}" for _, theirs, _ in _TAU if draft.has(_A + f"tau_{theirs}"))]
    elif name == "dppo":
        options = {"mask_low": low[0], "mask_high": high[0]}
    else:
        options = {"eps_low": min(1.0, low[0]), "eps_high": high[0]}
    if name == "ppo":
        dual = draft.number(_A + "clip_ratio_c")
        options["dual_clip"] = dual
        causes.append(_A + "clip_ratio_c")
    draft.put("algorithm.loss", {"name": name, "options": options}, *dict.fromkeys(causes))


_TAU = (("positive", "pos", 1.0), ("negative", "neg", 1.05))


def _clip(draft: Draft, side: str) -> tuple[float, list[str]]:
    """The bound of one side and its keys: `clip_ratio_low|high`, else `clip_ratio`."""
    own = _A + f"clip_ratio_{side}"
    key = own if draft.has(own) else _A + "clip_ratio"
    return draft.number(key) or 0.2, [key]


def _aggregation(draft: Draft, mode: str) -> None:
    key, old = _A + "loss_agg_mode", _A + "use_token_level_loss"
    wanted = str(draft.get(key))
    if not draft.has(key) and draft.has(old):
        draft.put("algorithm.aggregation", "token_mean" if draft.flag(old) else "seq_mean_token_mean", old)
        return
    if not draft.has(key) and mode == "gspo":
        draft.put("algorithm.aggregation", "seq_mean_token_mean", _MODE, note="as GSPO's loss in verl")
        return
    if wanted not in AGGREGATIONS:
        draft.refused[key] = f"known: {', '.join(AGGREGATIONS)}"
        return
    draft.put("algorithm.aggregation", AGGREGATIONS[wanted], key)
    if AGGREGATIONS[wanted] == "constant_length":
        scale = _A + "loss_scale_factor"
        length = draft.whole(scale) or draft.fields["sampling.maxTokens"].value
        draft.put("algorithm.aggregationLength", length, scale if draft.has(scale) else "data.max_response_length")


def _kl(draft: Draft) -> None:
    if (entropy := draft.number(_A + "entropy_coeff") or 0.0) > 0:
        draft.put("algorithm.regularizers.entropy", entropy, _A + "entropy_coeff")
    use, weight, kind = _A + "use_kl_loss", _A + "kl_loss_coef", _A + "kl_loss_type"
    in_reward, coefficient = "algorithm.use_kl_in_reward", "algorithm.kl_ctrl.kl_coef"
    if draft.flag(use) and (draft.number(weight) or 0.0) > 0:
        draft.put("algorithm.regularizers.kl", draft.number(weight), use, weight)
        theirs = str(draft.get(kind)).removesuffix("+")
        if theirs not in KL_KINDS:
            draft.refused[kind] = f"known: {', '.join(KL_KINDS)}"
            return
        draft.put("algorithm.regularizers.klKind", KL_KINDS[theirs], kind)
    elif draft.flag(in_reward) and (draft.number(coefficient) or 0.0) > 0:
        draft.put(
            "algorithm.regularizers.kl",
            draft.number(coefficient),
            in_reward,
            coefficient,
            note="in the loss: the reward has no KL term here",
        )
        draft.put("algorithm.regularizers.klKind", "k1")
        draft.notices.append(f"{in_reward}=true: the KL term is part of the loss here, not of the reward")
    else:
        return
    draft.put("algorithm.reference.model", "initial", note="verl's reference is the run's start")


def _filters(draft: Draft) -> None:
    enabled, length, factor = (_OVERLONG + name for name in ("enable", "len", "penalty_factor"))
    filters = draft.flag(_FILTER)
    overlong = draft.flag(enabled)
    if filters:
        draft.put("algorithm.filters.zeroVariance", True, _FILTER)
    if overlong:
        answer = draft.fields["sampling.maxTokens"].value
        share = min(1.0, (draft.whole(length) or answer // 5) / answer)
        draft.put("algorithm.filters.overlongPenalty", draft.number(factor), enabled, factor)
        draft.put("algorithm.filters.overlongBuffer", round(share, 6), length, note=f"share of {answer} tokens")


def _correction(draft: Draft, mode: str) -> None:
    proximal = LOSSES[mode][2]
    bypass = "algorithm.rollout_correction.bypass_mode"
    if proximal is not None:
        passes = draft.flag(bypass)
        draft.put(
            "algorithm.proximal",
            "inference" if passes else proximal,
            *([bypass] if draft.has(bypass) else []),
            note="" if passes else "verl recomputes the log-probs at the start of a step",
        )
    cap = _A + "tis_imp_ratio_cap"
    if (bound := draft.number(cap)) is not None and bound > 0:
        draft.put("algorithm.correction", {"action": "clamp", "level": "token", "high": bound}, cap)
    elif draft.get(_IS) in ("token", "sequence"):
        limit = _IS + "_threshold"
        level = draft.get(_IS)
        draft.put("algorithm.correction", {"action": "clamp", "level": level, "high": draft.number(limit)}, _IS, limit)
    elif PRESETS[draft.fields["algorithm.preset"].value].correction is not None:
        draft.put(
            "algorithm.correction", {"action": "none"}, note="verl corrects only where rollout_correction asks for it"
        )
