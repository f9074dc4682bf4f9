"""Objective of AReaL's settings: rewards, advantages, loss, KL, filters and rejection sampling.

The first part converts `actor.rejection_sampling`, the selection and weights of the tokens in the decoupled loss. Let x be the proximal
policy's log-probability minus the engine's. The weight of a kept token is exp(x); with `level: sequence` and `metric: ratio` it is the
geometric mean over the answer. `mask` drops tokens or answers whose metric is outside of the bounds, `clamp` limits the weight.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rlrun.convert.draft import Draft

_R = "actor.rejection_sampling"
_KEYS = ("level", "action", "metric", "agg", "upper", "lower")
_DEFAULTS = {"level": "token", "action": "mask", "metric": "ratio", "agg": "mean", "upper": 5.0}
_CHOICES = {
    "level": ("token", "sequence"),
    "action": ("mask", "clamp"),
    "metric": ("ratio", "kl_k1", "kl_k2", "kl_k3"),
    "agg": ("sum", "mean", "max"),
}


@dataclass(frozen=True)
class Weight:
    """Weight of the proximal policy's ratio to the engine."""

    cap: float | None
    """Option `cap` of the loss decoupled_ppo."""
    cap_mode: str
    correction: dict[str, Any] | None
    """Value of `algorithm.correction`, which replaces the loss's own cap."""
    causes: tuple[str, ...]


def weigh_behavior(draft: Draft, *, as_correction: bool = False) -> Weight | None:
    """Return the weight of the settings, or None if there are none or an option is refused.

    Args:
        draft: draft of the manifest.
        as_correction: whether the loss has no weight of its own, so that the weight must be a correction.
    """
    causes = tuple(f"{_R}.{name}" for name in _KEYS if draft.has_value(f"{_R}.{name}"))
    if not causes and not draft.has_value(_R):
        return None
    chosen = {name: draft.get(f"{_R}.{name}") or default for name, default in _DEFAULTS.items()}
    for name, known in _CHOICES.items():
        if chosen[name] not in known:
            draft.refused[f"{_R}.{name}"] = f"known: {', '.join(known)}"
            return None
    upper = draft.get_number(f"{_R}.upper") or 5.0
    lower = draft.get_number(f"{_R}.lower")
    bounds = {"high": upper} | ({"low": lower} if lower is not None else {})
    if chosen["metric"] == "ratio" and chosen["level"] == "token" and not lower and not as_correction:
        return Weight(upper, str(chosen["action"]), None, causes)
    bound = _bound_ratio if chosen["metric"] == "ratio" else _bound_divergence
    correction = bound(draft, chosen, bounds)
    return None if correction is None else Weight(None, "mask", correction, causes)


def _bound_ratio(draft: Draft, chosen: dict[str, Any], bounds: dict[str, float]) -> dict[str, Any] | None:
    sequence = {"level": "sequence", "reduce": chosen["agg"]}
    if chosen["level"] == "token":
        level: dict[str, Any] = {"level": "token"}
        return {
            "action": chosen["action"],
            **level,
            **({"weight": "token"} if chosen["action"] == "mask" else {}),
            **bounds,
        }
    if chosen["action"] == "mask":
        return {"action": "mask", **sequence, "weight": "geometric", **bounds}
    if chosen["agg"] != "mean":
        draft.refused[f"{_R}.agg"] = "with action: clamp the weight is always the geometric mean; write agg: mean"
        return None
    return {"action": "clamp", **sequence, **bounds}


def _bound_divergence(draft: Draft, chosen: dict[str, Any], bounds: dict[str, float]) -> dict[str, Any] | None:
    metric = chosen["metric"].removeprefix("kl_")
    if chosen["action"] == "clamp":
        draft.refused[f"{_R}.action"] = "AReaL supports action: clamp only with metric: ratio; write action: mask"
        return None
    if metric == "k3":  # AReaL: exp(-x) - 1 + x
        draft.refused[f"{_R}.metric"] = "RLRun's k3 has the opposite direction, exp(x) - 1 - x; nearest: metric: kl_k2"
        return None
    if metric == "k1":  # AReaL: x, RLRun: -x
        if "low" not in bounds:
            draft.refused[f"{_R}.metric"] = f"in RLRun kl_k1 needs two bounds; add lower: {-bounds['high']:g}"
            return None
        bounds = {"low": -bounds["high"], "high": -bounds["low"]}
    level = {"level": "sequence", "reduce": chosen["agg"]} if chosen["level"] == "sequence" else {"level": "token"}
    if level["level"] == "sequence" and metric == "k1" and chosen["agg"] == "max":
        draft.refused[f"{_R}.agg"] = "the maximum of AReaL's k1 is the minimum of RLRun's; write agg: mean"
        return None
    return {"action": "mask", **level, "measure": metric, "weight": "token", **bounds}


def put_correction(draft: Draft, weight: Weight | None, note: str) -> None:
    """Set `algorithm.correction`.

    Args:
        draft: draft of the manifest.
        weight: weight of the tokens, or None if tokens have no weight.
        note: reason if `weight` is None.
    """
    if weight is not None and weight.correction is not None:
        draft.set_field("algorithm.correction", weight.correction, *weight.causes)
    else:
        draft.set_field("algorithm.correction", {"action": "none"}, note=note)


_A = "actor."
_DECOUPLED, _LEVEL, _SAPO = _A + "use_decoupled_loss", _A + "importance_sampling_level", _A + "use_sapo_loss"


_PROXIMALS = ("recompute", "loglinear", "metrics", "reuse_train_logp")
"""Values of `prox_logp_method`."""


def put_objective(draft: Draft) -> None:
    """Set the fields of `algorithm`, except the staleness limits."""
    critic = any(key.startswith("critic.") for key in draft.settings)
    _compose_loss(draft, critic)
    if critic:
        _compose_critic(draft)
    else:
        _compose_advantage(draft)
        _report_discounts(draft)
    _report_scale(draft, critic)
    draft.set_field("algorithm.aggregation", "token_mean", note="AReaL divides by all loss tokens of the batch")
    _compose_kl(draft)
    _compose_filters(draft)


def _compose_loss(draft: Draft, critic: bool) -> None:
    low, high = _A + "eps_clip", _A + "eps_clip_higher"
    bounds: dict[str, Any] = {
        "eps_low": draft.get_number(low),
        "eps_high": draft.get_number(high) or draft.get_number(low),
    }
    clips = [low, *([high] if draft.has_value(high) else [])]
    if draft.get_flag(_SAPO) and draft.get_flag(_DECOUPLED):
        draft.refused[_SAPO] = "AReaL does not support SAPO with use_decoupled_loss; set use_decoupled_loss: false"
    if draft.get_flag(_SAPO):
        if draft.get(_LEVEL) == "sequence":
            draft.refused[_LEVEL] = (
                "SAPO's gate on sequence ratios is not supported; nearest: importance_sampling_level: token"
            )
        taus = [_A + "sapo_tau_pos", _A + "sapo_tau_neg"]
        options = {"tau_positive": draft.get_number(taus[0]) or 1.0, "tau_negative": draft.get_number(taus[1]) or 1.05}
        _put_field(draft, "sapo", options, "sapo", [_SAPO, *(tau for tau in taus if draft.has_value(tau))])
        _compose_proximal(draft)
    elif draft.get(_LEVEL) == "sequence":
        _put_field(draft, "gspo", bounds, "gspo", [_LEVEL, *clips])
        _compose_proximal(draft)
        weight = weigh_behavior(draft, as_correction=True) if draft.get_flag(_DECOUPLED) else None
        put_correction(draft, weight, "AReaL applies weights only in the decoupled loss with rejection_sampling")
    elif draft.get_flag(_DECOUPLED):
        _compose_decoupled(draft, bounds, clips, critic)
    else:
        dual = _A + "c_clip"
        bounds["dual_clip"] = draft.get_number(dual)
        _put_field(
            draft, "ppo", bounds, "ppo" if critic else "grpo", [*clips, *([dual] if draft.has_value(dual) else [])]
        )
        _compose_proximal(draft)


def _compose_decoupled(draft: Draft, bounds: dict[str, Any], clips: list[str], critic: bool) -> None:
    """Set the ratio to the proximal policy, weighted by the proximal policy's ratio to the engine within the configured bounds."""
    dual, cap, mode = _A + "c_clip", _A + "behav_imp_weight_cap", _A + "behave_imp_weight_mode"
    dual_clip = {"dual_clip": draft.get_number(dual)}
    causes = [_DECOUPLED, *clips, *([dual] if draft.has_value(dual) else [])]
    weight = weigh_behavior(draft)
    if weight is None and draft.has_value(cap):  # releases before 1.0
        truncates = "truncate" in str(draft.get(mode) or "")
        weight = Weight(
            draft.get_number(cap),
            "clamp" if truncates else "mask",
            None,
            (cap, *((mode,) if draft.has_value(mode) else ())),
        )
    if weight is not None and weight.correction is None:
        options = bounds | dual_clip | {"cap": weight.cap, "cap_mode": weight.cap_mode}
        _put_field(draft, "decoupled_ppo", options, "ppo" if critic else "decoupled_ppo", [*causes, *weight.causes])
    else:
        _put_field(draft, "ppo", bounds | dual_clip, "ppo" if critic else "grpo", causes)
        put_correction(draft, weight, "AReaL applies weights only with rejection_sampling")
    _compose_proximal(draft)


def _put_field(draft: Draft, loss: str, options: dict[str, Any], preset: str, causes: list[str]) -> None:
    draft.set_field("algorithm.preset", preset, *([causes[0]] if causes[0] in (_DECOUPLED, _LEVEL, _SAPO) else []))
    draft.set_field("algorithm.loss", {"name": loss, "options": options}, *causes)


def _compose_proximal(draft: Draft) -> None:
    method, recompute = _A + "prox_logp_method", _A + "recompute_logprob"
    if draft.get_flag(_DECOUPLED) and draft.has_value(method) and draft.get(method) not in _PROXIMALS:
        draft.refused[method] = f"known: {', '.join(_PROXIMALS)}"
    updates = draft.get_integer(_A + "ppo_n_minibatches") or 1
    if draft.get_flag(_DECOUPLED) and draft.get(method) == "reuse_train_logp" and updates > 1:
        draft.refused[method] = (
            f"the proximal policy changes with each of the {updates} updates of a step, so no ratio is clipped; in RLRun it is the policy "
            "at the start of the step: write prox_logp_method: recompute, or ppo_n_minibatches: 1"
        )
    if draft.get_flag(_DECOUPLED) and "linear" in str(draft.get(method) or ""):
        draft.set_field("algorithm.proximal", "log_linear", method)
    elif draft.get_flag(_DECOUPLED) or draft.get_flag(recompute):
        causes = [key for key in (_DECOUPLED, recompute, method) if draft.has_value(key) and draft.get(key)]
        draft.set_field("algorithm.proximal", "recompute", *causes)
    else:
        draft.set_field("algorithm.proximal", "inference", *([recompute] if draft.has_value(recompute) else []))


def _compose_critic(draft: Draft) -> None:
    options: dict[str, object] = {
        "gamma": draft.get_number(_A + "discount"),
        "lam": draft.get_number(_A + "gae_lambda"),
    }
    more, causes = _normalization_options(draft)
    value = {"name": "gae", "options": options | {"adv_mean": "none", "adv_std": "none"} | more}
    draft.set_field("algorithm.advantage", value, _A + "discount", _A + "gae_lambda", *causes)
    rate = "critic.optimizer.lr"
    causes = [rate] if draft.has_value(rate) else ["critic.optimizer", "actor.optimizer.lr"]
    draft.set_field(
        "algorithm.critic.lr", draft.get_number(rate) or draft.get_number("actor.optimizer.lr") or 1e-5, *causes
    )
    draft.set_field("algorithm.critic.valueClip", draft.get_number("critic.eps_clip"), "critic.eps_clip")
    for key in ("mean_level", "std_level", "mean_leave1out"):
        draft.dropped[f"actor.reward_norm.{key}"] = "in RLRun a critic's advantages do not use normalized rewards"


def _normalization_options(draft: Draft) -> tuple[dict[str, object], list[str]]:
    """Return the options of `adv_norm` and their keys."""
    options, causes = {}, []
    for theirs, ours in (("mean_level", "adv_mean"), ("std_level", "adv_std")):
        key = f"{_A}adv_norm.{theirs}"
        if draft.get(key) in ("batch", "group"):
            options[ours] = draft.get(key)
            causes.append(key)
    return options, causes


def _compose_advantage(draft: Draft) -> None:
    norm = _A + "reward_norm."
    mean, std, apart = norm + "mean_level", norm + "std_level", norm + "mean_leave1out"
    more, causes = _normalization_options(draft)
    if draft.get_flag(apart):
        if draft.has_value(std):
            draft.dropped[std] = "the advantage rloo does not divide by a standard deviation"
        draft.set_field(
            "algorithm.advantage", {"name": "rloo", "options": more} if more else {"name": "rloo"}, mean, apart, *causes
        )
        return
    options = {"mean": draft.get(mean) or "none", "std": draft.get(std) or "none"}
    written = [key for key in (mean, std) if key in draft.settings]
    draft.set_field("algorithm.advantage", {"name": "grpo", "options": options | more}, *written, *causes)


def _report_discounts(draft: Draft) -> None:
    """Report discounts per token, which group advantages do not support."""
    for key in ("discount", "gae_lambda"):
        if (number := draft.get_number(_A + key)) is not None and number != 1.0:
            draft.dropped[_A + key] = "only with a critic: a group advantage is equal for all tokens of an answer"
            draft.notices.append(f"{_A}{key}={number}: {draft.dropped[_A + key]}")


def _report_scale(draft: Draft, critic: bool) -> None:
    """Report reward bias and scaling if no normalization cancels them."""
    for key, level, neutral in (("reward_bias", "mean_level", 0.0), ("reward_scaling", "std_level", 1.0)):
        number = draft.get_number(_A + key)
        undone = any(draft.get(f"{_A}{part}.{level}") for part in ("adv_norm", *(() if critic else ("reward_norm",))))
        if number is not None and number != neutral and (critic or not undone):
            draft.dropped[_A + key] = "rewards come from the environment without bias and scaling"
            draft.notices.append(
                f"{_A}{key}={number}: rewards come from the environment, unscaled{', so the critic has other values' if critic else ''}"
            )


def _compose_kl(draft: Draft) -> None:
    weight, kind = _A + "kl_ctl", _A + "kl_estimator"
    if (coefficient := draft.get_number(weight) or 0.0) <= 0:
        return
    draft.set_field("algorithm.regularizers.klReward", coefficient, weight)
    draft.set_field("algorithm.regularizers.klRewardKind", draft.get(kind), kind)
    draft.set_field("algorithm.reference.model", "initial", note="AReaL's reference is the run's start")


def _compose_filters(draft: Draft) -> None:
    penalty, tokens, factor = (
        _A + name for name in ("overlong_reward_penalty", "overlong_tokens", "overlong_penalty_factor")
    )
    if draft.get_flag(penalty):
        answer = draft.fields["sampling.maxTokens"].value
        share = min(1.0, (draft.get_integer(tokens) or answer // 5) / answer)
        draft.set_field("algorithm.filters.overlongPenalty", draft.get_number(factor), penalty, factor)
        draft.set_field("algorithm.filters.overlongBuffer", round(share, 6), tokens, note=f"share of {answer} tokens")
    for theirs, ours in (("dynamic_sampling", "zeroVariance"), ("mask_no_eos_with_zero", "overlongMask")):
        if draft.get_flag(_A + theirs):
            draft.set_field(f"algorithm.filters.{ours}", True, _A + theirs)
