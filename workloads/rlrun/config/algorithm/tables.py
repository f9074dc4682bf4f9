"""Names, options, defaults and bounds of every advantage, policy loss, aggregation and correction.

Pure data and the types that declare it, without torch.
"""

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

    def find_problem(self, value: object) -> str | None:
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
        return f"must be {self._range_text()}, got {value!r}" if too_low or value > self.high else None

    def _range_text(self) -> str:
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


AGGREGATIONS: Mapping[str, str] = {
    "token_mean": "mean over all loss tokens of the batch",
    "seq_mean_token_sum": "sum over the tokens of each sequence, mean over the sequences",
    "seq_mean_token_mean": "mean over the tokens of each sequence, mean over the sequences",
    "constant_length": "sum over the tokens of each sequence divided by a constant length, mean over the sequences (Dr. GRPO)",
}
PROXIMAL_METHODS: Mapping[str, str] = {
    "inference": "o = i: the policy that sampled the tokens",
    "recompute": "o = the policy at the start of the step",
    "log_linear": "o = i + α(t - i), α = clamp((v_θ - 1 - v_b)/(v_θ - v_b), 0, 1) from the policy versions v; no extra pass",
}
KL_KINDS: Mapping[str, str] = {
    "k1": "d; only in the reward, because its expected gradient in a loss is 0",
    "k2": "d²/2, with the gradient of the KL divergence on-policy",
    "k3": "e^{-d} - 1 + d",
    "k1+": "the value of k1 with the gradient of k2; verl's kl+",
    "k3+": "the value of k3 with the gradient of k2; verl's low_var_kl+",
    "k3_unbiased": "ρ·(e^{-d} - 1 + d), with the gradient of ρ too: value and gradient without bias, off-policy as well (DeepSeek-V3.2)",
}
"""Estimators of the KL divergence to the reference, with d = t - ref."""
KL_REWARD_KINDS = ("k1", "k2", "k3")
"""Estimators for KL in the reward, which need a value but no gradient."""

_LEVELS = ("none", "group", "batch")
_REWARDS = {
    "turn_discount": Option(
        1.0, "multiply the reward by this to the power of turns - 1", low=0.0, high=1.0, low_excluded=True
    ),
    "length_penalty": Option(0.0, "then subtract this times the rollout's tokens from the reward", low=0.0, high=1e9),
}
_GLOBAL_STD = {
    "global_std": Option(False, "divide by the unbiased standard deviation of the rewards of the whole batch, + 1e-6")
}
_NEG_CLIPPED = {"neg_clipped": Option(False, "replace negative advantages by 0, as the last operation")}


def _normalization_options(level: str) -> Mapping[str, Option]:
    """Return AReaL's adv_norm: options of every estimator, with the default `level`."""
    return {
        "adv_mean": Option(
            level, "then subtract the advantages' mean over the loss tokens of the group or batch", choices=_LEVELS
        ),
        "adv_std": Option(
            level,
            "divide by their unbiased standard deviation around the subtracted value, + 1e-6",
            choices=_LEVELS,
        ),
    }


_EVERY_ADVANTAGE = {**_REWARDS, **_GLOBAL_STD, **_normalization_options("none"), **_NEG_CLIPPED}
_RETURN_TO_GO = {
    **_REWARDS,
    "gamma": Option(1.0, "discount of the reward per loss token between it and the token", low=0.0, high=1.0),
    **_normalization_options("batch"),
    **_NEG_CLIPPED,
}

ADVANTAGE_ENTRIES: Mapping[str, Entry] = {
    "grpo": Entry(
        "R - mean of the group, over rollouts",
        {
            "mean": Option("group", "subtract the mean reward of the group, of the batch, or none", choices=_LEVELS),
            "std": Option(
                "none",
                "divide by the rewards' unbiased standard deviation around the subtracted value, + 1e-6",
                choices=_LEVELS,
            ),
            **_EVERY_ADVANTAGE,
        },
    ),
    "dr_grpo": Entry("R - mean of the group; meant for the aggregation `constant_length`", dict(_EVERY_ADVANTAGE)),
    "rloo": Entry("(R - mean)·G/(G-1): the mean of the other rollouts is the baseline", dict(_EVERY_ADVANTAGE)),
    "opo": Entry(
        "R - ΣR·L/ΣL: the length-weighted mean of the group is the baseline",
        {
            "leave_one_out": Option(False, "exclude the rollout from its own baseline: (ΣRL - RL)/(ΣL - L)"),
            **_EVERY_ADVANTAGE,
        },
        reads=("lengths",),
    ),
    "max_rl": Entry(
        "(R - mean)/mean of the group, scaled to within ±(G-1); 0 if the mean is not positive",
        dict(_EVERY_ADVANTAGE),
    ),
    "qae": Entry(
        "R - quantile of the group: of rewards 0 and 1, rare successes of hard tasks or rare failures of easy ones",
        {
            "quantile": Option(
                0.5,
                "the baseline is the smallest reward that at least this share of the group does not exceed; 0.5: the (lower) median",
                low=0.0,
                high=1.0,
                low_excluded=True,
            ),
            **_EVERY_ADVANTAGE,
        },
    ),
    "reinforce_pp": Entry(
        "return-to-go of R, whitened over all loss tokens of the batch", _RETURN_TO_GO, reads=("lengths",)
    ),
    "reinforce_pp_baseline": Entry(
        "return-to-go of R - mean of the group, whitened over all loss tokens of the batch",
        _RETURN_TO_GO,
        reads=("lengths",),
    ),
    "reward": Entry("R itself, without a baseline", dict(_EVERY_ADVANTAGE)),
    "gae": Entry(
        "generalized advantage estimation per token from a critic's values, whitened over all loss tokens of the batch",
        {
            "gamma": Option(1.0, "discount of the reward per token", low=0.0, high=1.0),
            "lam": Option(1.0, "λ: 1 is the return minus the value, 0 is the one-step difference", low=0.0, high=1.0),
            "bootstrap": Option(
                True,
                "for an answer truncated by a token limit, use the value after its last token as the value of the continuation; false: 0",
            ),
            **_normalization_options("batch"),
        },
        needs="critic",
    ),
}

_CLIP = {
    "eps_low": Option(0.2, "the ratio is clipped from below at 1 - eps_low", low=0.0, high=1.0),
    "eps_high": Option(0.2, "the ratio is clipped from above at 1 + eps_high", low=0.0),
    "dual_clip": Option(3.0, "cap of the ratio if A < 0; null: no cap", low=1.0, low_excluded=True, nullable=True),
}
_KL_TAU = Option(1e-3, "weight of (log ρ)²", low=0.0)
_TEACHER = {
    "mask_low": Option(0.2, "drop the token if its probability decreased by more than this", low=0.0),
    "kl_tau": _KL_TAU,
}

LOSS_ENTRIES: Mapping[str, Entry] = {
    "aipo": Entry(
        "one-sided truncated importance sampling: -min(ρ, δ)·A",
        {"delta": Option(8.0, "cap δ of the ratio ρ", low=0.0, low_excluded=True)},
        weighs=True,
    ),
    "ppo": Entry(
        "clipped ratio to the proximal policy, with a dual clip for negative advantages",
        dict(_CLIP),
        reads=("proximal_logprobs",),
        bands=("eps_low", "eps_high"),
    ),
    "decoupled_ppo": Entry(
        "ppo on exp(t - o), weighted by sg exp(o - i)",
        {
            **_CLIP,
            "cap": Option(
                5.0, "upper bound of the weight exp(o - i); null: no bound", low=0.0, low_excluded=True, nullable=True
            ),
            "cap_mode": Option("clamp", "clamp: cap the weight; mask: drop the token", choices=("clamp", "mask")),
        },
        reads=("proximal_logprobs",),
        weighs=True,
        bands=("eps_low", "eps_high"),
        proximal="recompute",
    ),
    "gspo": Entry(
        "clipped ratio of the whole sequence, with a gradient per token",
        {
            "eps_low": Option(3e-4, "the sequence's ratio is clipped from below at 1 - eps_low", low=0.0, high=1.0),
            "eps_high": Option(4e-4, "the sequence's ratio is clipped from above at 1 + eps_high", low=0.0),
        },
        reads=("proximal_logprobs",),
        bands=("eps_low", "eps_high"),
        proximal="recompute",
    ),
    "cispo": Entry(
        "clipped importance weight times A·t: tokens with a clipped weight keep their gradient",
        {
            "eps_low": Option(
                1.0, "the weight is clipped from below at 1 - eps_low; 1 means no bound", low=0.0, high=1.0
            ),
            "eps_high": Option(5.0, "the weight is clipped from above at 1 + eps_high", low=0.0),
        },
        reads=("proximal_logprobs",),
        bands=("eps_low", "eps_high"),
    ),
    "sapo": Entry(
        "soft gate (4/τ)·σ(τ(r - 1)) instead of a clip: -gate·A",
        {
            "tau_positive": Option(1.0, "τ if A > 0", low=0.0, low_excluded=True),
            "tau_negative": Option(1.05, "τ if A <= 0", low=0.0, low_excluded=True),
        },
        reads=("proximal_logprobs",),
    ),
    "masked_is": Entry(
        "importance sampling that drops tokens and sequences with extreme ratios; -sg(ρ·coefficient)·t",
        {
            "ratio": Option(
                "token", "ratio of each token, or one ratio of the whole sequence", choices=("token", "sequence")
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
            "sequence_clip": Option(
                10.0,
                "cap of the sequence's ratio (ratio: sequence)",
                low=0.0,
                low_excluded=True,
                only_with=("ratio", "sequence"),
            ),
            "adv_tau": Option(1.0, "weight of the advantage", low=0.0),
            "teacher_tau": Option(0.0, "weight of ref - t", low=0.0, needs="reference"),
            "kl_tau": Option(0.0, "weight of -log ρ", low=0.0),
        },
        reads=("reference_logprobs",),
        ordered=(("mask_low", "mask_high"), ("geo_mask_low", "geo_mask_high")),
        weighs=True,
    ),
    "dppo": Entry(
        "drop a token if its probability moved too far in the direction of its advantage; -A·ρ + kl_tau·(log ρ)²",
        {
            "mask_low": Option(0.2, "drop if A <= 0 and the probability decreased by more than this", low=0.0),
            "mask_high": Option(0.2, "drop if A > 0 and the probability increased by more than this", low=0.0),
            "kl_tau": _KL_TAU,
        },
        weighs=True,
        bands=("mask_low", "mask_high"),
    ),
    "ipo": Entry(
        "drop a token if its probability moved too far, for any advantage; -A·ρ + kl_tau·(log ρ)²",
        {"thr": Option(0.1, "drop if the probability moved by more than this", low=0.0), "kl_tau": _KL_TAU},
        weighs=True,
        bands=("thr",),
    ),
    "ref_kl": Entry(
        "on-policy distillation: -sg(ref - t)·ρ + kl_tau·(log ρ)², independent of the rewards",
        dict(_TEACHER),
        reads=("reference_logprobs",),
        needs="reference",
        weighs=True,
        bands=("mask_low",),
        rewarded=False,
    ),
    "distill": Entry(
        "reverse KL to a teacher on tokens that the student sampled: the term of `ref_kl`",
        dict(_TEACHER),
        reads=("reference_logprobs",),
        needs="reference",
        weighs=True,
        bands=("mask_low",),
        rewarded=False,
        function="ref_kl",
    ),
    "sft": Entry("negative log-likelihood -w·t, weighted by the advantage w"),
}
"""Declaration of each loss. The function of the same name in `rlrun.algorithms.losses`, which imports torch, implements it."""

CORRECTION_OPTIONS: Mapping[str, Option] = {
    "action": Option(
        "clamp",
        "clamp: weight by the ratio, clamped to [low, high]; mask: drop tokens outside, see `weight` for the others; "
        "none: no correction, even if the preset has one",
        choices=("clamp", "mask", "none"),
    ),
    "level": Option(
        "token", "compare each token, or each sequence as a unit, with the bounds", choices=("token", "sequence")
    ),
    "measure": Option(
        "ratio",
        "ratio exp(x), or an estimate of KL(engine ‖ trainer): k1 = -x, k2 = x²/2, k3 = exp(x) - 1 - x",
        choices=("ratio", "k1", "k2", "k3"),
    ),
    "reduce": Option(
        "mean",
        "of a sequence: mean (of the ratio: geometric mean), sum (of the ratio: product) or max over its tokens",
        choices=("mean", "sum", "max"),
        only_with=("level", "sequence"),
    ),
    "weight": Option(
        "none",
        "with mask, weight of the kept tokens: 1 (none), the token's ratio, or the product or geometric mean of the sequence's ratios",
        choices=("none", "token", "sequence", "geometric"),
    ),
    "cap": Option(
        None, "upper limit of that weight; null: no limit except the bounds", low=0.0, low_excluded=True, nullable=True
    ),
    "low": Option(0.0, "lower bound of the measure; for k1 the default is -high"),
    "high": Option(2.0, "upper bound of the measure"),
}
"""Options of a correction, with x = o - i, or t - i without proximal log-probs."""
