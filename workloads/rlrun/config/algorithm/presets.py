"""The presets: named combinations of advantage, loss, aggregation and filters. Pure data, from which the docs page is generated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rlrun.config.algorithm.tables import OptionValue

DEFAULT_PRESET = "aipo"
DEFAULT_ADVANTAGE = "grpo"
DEFAULT_LOSS = "aipo"


@dataclass(frozen=True)
class Preset:
    """Parts of a preset. Options that are not listed have their default. `filters` has fields of `FilterConfig`."""

    description: str
    advantage: str = DEFAULT_ADVANTAGE
    loss: str = DEFAULT_LOSS
    advantage_options: Mapping[str, OptionValue] = field(default_factory=dict)
    loss_options: Mapping[str, OptionValue] = field(default_factory=dict)
    aggregation: str | None = None
    """Aggregation over tokens; None: the aggregation of the loss."""
    filters: Mapping[str, OptionValue] = field(default_factory=dict)
    correction: Mapping[str, OptionValue] | None = None
    """Options of the correction for the preset's own loss, if its proximal policy does not include the mismatch with the engine."""


_CLIP = {"dual_clip": None}
"""Options for papers that clip the ratio only on two sides."""

PRESETS: Mapping[str, Preset] = {
    "aipo": Preset("the default: group-mean baseline without std, one-sided truncated importance sampling (LlamaRL)"),
    "grpo": Preset(
        "group mean and std, clipped ratio, mean over each answer's tokens, then over answers (DeepSeekMath; TRL's `loss_type: grpo`). "
        "TRL's and verl's current default: `aggregation: token_mean`. The paper's KL term: `regularizers: {kl: 0.04}` and a `reference`",
        advantage_options={"std": "group"},
        loss="ppo",
        loss_options=_CLIP,
        aggregation="seq_mean_token_mean",
    ),
    "dr_grpo": Preset(
        "clipped ratio, no std, each answer's sum divided by a constant length: no bias towards short or long answers (Dr. GRPO)",
        advantage="dr_grpo",
        loss="ppo",
        loss_options=_CLIP,
        aggregation="constant_length",
    ),
    "rloo": Preset(
        "leave-one-out baseline; sum over each answer's tokens, mean over answers, like REINFORCE on whole answers; "
        "truncated importance sampling for off-policy data",
        advantage="rloo",
        aggregation="seq_mean_token_sum",
    ),
    "opo": Preset(
        "length-weighted baseline; the paper is strictly on-policy (`maxAsyncLevel: 0`), off-policy data are weighted by truncated "
        "importance sampling",
        advantage="opo",
    ),
    "reinforce_pp": Preset(
        "no groups: returns whitened over all loss tokens of the batch, clipped ratio (REINFORCE++). "
        "KL in the reward: `regularizers: {klReward: ...}` and a `reference`",
        advantage="reinforce_pp",
        loss="ppo",
        loss_options=_CLIP,
    ),
    "reinforce_pp_baseline": Preset(
        "group-mean baseline, whitened over all loss tokens of the batch, clipped ratio (REINFORCE++-baseline). "
        "KL term: `regularizers: {kl: ..., klKind: k2}` and a `reference`",
        advantage="reinforce_pp_baseline",
        loss="ppo",
        loss_options=_CLIP,
    ),
    "max_rl": Preset(
        "group-mean baseline divided by the mean, which gives hard tasks more weight (MaxRL); truncated importance sampling",
        advantage="max_rl",
    ),
    "ppo": Preset(
        "actor and critic: generalized advantage estimation, clipped ratio (PPO)",
        advantage="gae",
        loss="ppo",
        loss_options=_CLIP,
    ),
    "decoupled_ppo": Preset(
        "clipped ratio to the policy at the start of the step, weighted by its ratio to the engine (AReaL), on group-mean advantages",
        loss="decoupled_ppo",
        loss_options=_CLIP,
    ),
    "gspo": Preset(
        "group mean and std, clipped ratio of whole answers to the policy at the start of the step, mean over answers (GSPO); "
        "the mismatch with the engine is corrected separately, by truncated importance weights",
        loss="gspo",
        advantage_options={"std": "group"},
        aggregation="seq_mean_token_mean",
        correction={"action": "clamp", "level": "token", "high": 2.0},
    ),
    "cispo": Preset(
        "group mean and std, clipped importance weights, token mean (MiniMax-M1)",
        loss="cispo",
        advantage_options={"std": "group"},
    ),
    "sapo": Preset(
        "group mean and std, soft gate on the ratio, mean over each answer's tokens, then over answers (SAPO)",
        loss="sapo",
        advantage_options={"std": "group"},
        aggregation="seq_mean_token_mean",
    ),
    "masked_is": Preset(
        "group-mean baseline, importance sampling with token and sequence masks (PRIME-RL v0.3)", loss="masked_is"
    ),
    "dppo": Preset("group-mean baseline, trust region on probability differences (PRIME-RL)", loss="dppo"),
    "ipo": Preset("group-mean baseline, trust region on probability differences of either sign (PRIME-RL)", loss="ipo"),
    "dapo": Preset(
        "group mean and std, higher upper clip, token mean, dynamic sampling, soft penalty for overlong answers (DAPO)",
        loss="ppo",
        advantage_options={"std": "group"},
        loss_options={**_CLIP, "eps_high": 0.28},
        aggregation="token_mean",
        filters={"zero_variance": True, "overlong_penalty": 1.0},
    ),
    "distill": Preset("on-policy distillation from a teacher, without rewards", loss="distill"),
    "sft": Preset(
        "likelihood: of the demonstrations of an SFT run, or of an RL run's own rollouts weighted by their reward",
        advantage="reward",
        loss="sft",
    ),
}
