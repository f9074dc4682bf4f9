"""AReaL's `actor.rejection_sampling`: selection and weights of the tokens in the decoupled loss.

Let x be the proximal policy's log-probability minus the engine's. The weight of a kept token is exp(x); with `level: sequence` and
`metric: ratio` it is the geometric mean over the answer. `mask` drops tokens or answers whose metric is outside of the bounds,
`clamp` limits the weight.
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
    causes = tuple(f"{_R}.{name}" for name in _KEYS if draft.has(f"{_R}.{name}"))
    if not causes and not draft.has(_R):
        return None
    chosen = {name: draft.get(f"{_R}.{name}") or default for name, default in _DEFAULTS.items()}
    for name, known in _CHOICES.items():
        if chosen[name] not in known:
            draft.refused[f"{_R}.{name}"] = f"known: {', '.join(known)}"
            return None
    upper = draft.number(f"{_R}.upper") or 5.0
    lower = draft.number(f"{_R}.lower")
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
        draft.put("algorithm.correction", weight.correction, *weight.causes)
    else:
        draft.put("algorithm.correction", {"action": "none"}, note=note)
