"""The presets: named points of the grid advantage x loss x aggregation x filters. Pure data; the docs page is made of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rlrun.config.algorithm_options import OptionValue

DEFAULT_ADVANTAGE = "grpo"
DEFAULT_LOSS = "aipo"


@dataclass(frozen=True)
class Preset:
    """Options that are not listed have their default. `filters` holds fields of `FilterConfig`."""

    description: str
    advantage: str = DEFAULT_ADVANTAGE
    loss: str = DEFAULT_LOSS
    advantage_options: Mapping[str, OptionValue] = field(default_factory=dict)
    loss_options: Mapping[str, OptionValue] = field(default_factory=dict)
    aggregation: str | None = None
    """None: that of the loss."""
    filters: Mapping[str, OptionValue] = field(default_factory=dict)


PRESETS: Mapping[str, Preset] = {
    "grpo": Preset("group-mean baseline without std, truncated importance sampling: the default"),
    "dr_grpo": Preset(
        "group-mean baseline, each sequence divided by a constant length: no bias towards short or long answers",
        advantage="dr_grpo",
        aggregation="constant_length",
    ),
    "rloo": Preset("leave-one-out baseline, truncated importance sampling", advantage="rloo"),
    "opo": Preset("length-weighted baseline, truncated importance sampling", advantage="opo"),
    "reinforce_pp": Preset("rewards whitened over the batch, without groups (REINFORCE++)", advantage="reinforce_pp"),
    "max_rl": Preset("group-mean baseline divided by the mean: hard tasks weigh more (MaxRL)", advantage="max_rl"),
    "aipo": Preset("truncated importance sampling (LlamaRL) on group-mean advantages", loss="aipo"),
    "ppo": Preset("clipped ratio with dual clip on group-mean advantages, no critic", loss="ppo"),
    "decoupled_ppo": Preset(
        "clipped ratio to the policy at the start of the step, weighted by its ratio to the engine (AReaL)",
        loss="decoupled_ppo",
    ),
    "gspo": Preset(
        "clipped sequence ratio on group-mean advantages, mean over sequences",
        loss="gspo",
        aggregation="seq_mean_token_mean",
    ),
    "cispo": Preset("clipped importance weights on group-mean advantages", loss="cispo"),
    "sapo": Preset(
        "soft gate on the ratio, advantages in units of the group's standard deviation, mean over sequences",
        loss="sapo",
        advantage_options={"std": "group"},
        aggregation="seq_mean_token_mean",
    ),
    "masked_is": Preset("importance sampling with token and sequence masks (PRIME-RL v0.3)", loss="masked_is"),
    "dppo": Preset("trust region on probability differences (PRIME-RL)", loss="dppo"),
    "ipo": Preset("trust region on probability differences of either sign", loss="ipo"),
    "dapo": Preset(
        "higher upper clip, group standard deviation, token mean, dynamic sampling, soft penalty of overlong answers",
        loss="ppo",
        advantage_options={"std": "group"},
        loss_options={"eps_high": 0.28},
        aggregation="token_mean",
        filters={"zero_variance": True, "overlong_penalty": 1.0},
    ),
    "distill": Preset("on-policy distillation from a teacher, without rewards", loss="distill"),
    "sft": Preset(
        "likelihood: of an SFT run's demonstrations, or of a run's own rollouts weighted by their reward",
        advantage="reward",
        loss="sft",
    ),
}
