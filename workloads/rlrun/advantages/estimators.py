"""Advantages of whole rollouts from the rewards of their group."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rlrun.config.algorithm_names import is_import_path
from rlrun.custom import bind, builtins

STD_FLOOR = 1e-6
Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class RewardGroups:
    """N rewards in K groups: numpy arrays. `rewards` `[N]` fp64, `group_ids` `[N]` in 0..K-1, `lengths` `[N]` fp64 tokens or None.

    fp64 because a group of equal rewards must give 0 even after a division by 1e-6.
    """

    rewards: Floats
    group_ids: Integers
    num_groups: int
    lengths: Floats | None = None

    def sum(self, values: Floats) -> Floats:
        """The group's total of `values` `[N]`, repeated for each of its members: `[N]`."""
        totals = np.bincount(self.group_ids, weights=values, minlength=self.num_groups)
        return totals.astype(np.float64)[self.group_ids]

    @property
    def sizes(self) -> Floats:
        """G of each rollout's group, `[N]`."""
        return self.sum(np.ones_like(self.rewards))

    @property
    def centred(self) -> Floats:
        """R - mean of the group, `[N]`."""
        return self.rewards - self.sum(self.rewards) / self.sizes


def advantages(
    name: str,
    rewards: npt.ArrayLike,
    *,
    group_size: int | None = None,
    group_ids: npt.ArrayLike | None = None,
    lengths: npt.ArrayLike | None = None,
    turns: npt.ArrayLike | None = None,
    **options: Any,
) -> npt.NDArray[np.float32]:
    """One advantage per rollout, `[N]` fp32.

    Args:
        name: a key of `ADVANTAGES`, or `package.module:function`, called as `function(RewardGroups, **options)` and
            returning `[N]` numbers.
        rewards: `[N]`.
        group_size: contiguous groups of this size; or
        group_ids: `[N]` integers, equal within a group; groups may be of any size and interleaved.
        lengths: `[N]` lengths in tokens, 0 for an empty answer, read by `opo` and by a `length_penalty`.
        turns: `[N]` positive numbers of the model's turns, read by a `turn_discount`; default: one each.
        options: of the estimator, see `ADVANTAGES[name].options`. `global_std` looks at the rewards of this call.

    Raises:
        ValueError: names the argument that is misaligned, not finite, unknown or out of range.
    """
    function, complete = bind("advantage", name, ADVANTAGES, options)
    values = _vector("rewards", rewards)
    ids, num_groups = _groups(len(values), group_size, group_ids)
    weights, steps = _counts("lengths", lengths, values, least=0), _counts("turns", turns, values, least=1)
    if not is_import_path(name):
        values = _shaped(
            values, weights, steps, complete.pop("turn_discount", 1.0), complete.pop("length_penalty", 0.0)
        )
    result = function(RewardGroups(values, ids, num_groups, weights), **complete)
    return _returned(name, result, len(values))


def grpo(groups: RewardGroups, *, std: str, global_std: bool, neg_clipped: bool) -> Floats:
    """R - mean (Dr. GRPO's bias-free form); `std="group"` divides as in DeepSeekMath, a group of 1 by 1."""
    advantage = groups.centred
    if std == "group":
        variance = groups.sum(np.square(advantage)) / np.maximum(groups.sizes - 1, 1)
        advantage = advantage / np.where(groups.sizes > 1, np.sqrt(variance) + STD_FLOOR, 1)
    return _finish(groups, advantage, global_std, neg_clipped)


def dr_grpo(groups: RewardGroups, *, global_std: bool, neg_clipped: bool) -> Floats:
    """R - mean (Liu et al. 2025); the constant length is the aggregation's part."""
    return _finish(groups, groups.centred, global_std, neg_clipped)


def rloo(groups: RewardGroups, *, global_std: bool, neg_clipped: bool) -> Floats:
    """(R - mean)·G/(G-1), that is R less the mean of the others (Ahmadian et al. 2024); a group of 1 keeps R."""
    others = np.maximum(groups.sizes - 1, 1)
    advantage = np.where(groups.sizes > 1, groups.centred * groups.sizes / others, groups.rewards)
    return _finish(groups, advantage, global_std, neg_clipped)


def opo(groups: RewardGroups, *, leave_one_out: bool, global_std: bool, neg_clipped: bool) -> Floats:
    """R - ΣR·L/ΣL: the baseline of least variance if the gradient's norm grows with length (OPO, Hao et al. 2025).

    `leave_one_out`: (ΣRL - RL)/(ΣL - L) as the baseline; a group of 1 keeps R. Where ΣL is 0, the group's mean is it.
    """
    if groups.lengths is None:
        raise ValueError("lengths must be given for advantage opo: it weights the baseline by length")
    # Centred first: equal rewards then give exactly 0, the definition does not change.
    weighted = groups.centred * groups.lengths
    total, length = groups.sum(weighted), groups.sum(groups.lengths)
    if not leave_one_out:
        return _finish(groups, groups.centred - total / np.where(length > 0, length, 1), global_std, neg_clipped)
    others = length - groups.lengths
    baseline = (total - weighted) / np.where(others > 0, others, 1)
    advantage = np.where(groups.sizes > 1, groups.centred - baseline, groups.rewards)
    return _finish(groups, advantage, global_std, neg_clipped)


def max_rl(groups: RewardGroups, *, global_std: bool, neg_clipped: bool) -> Floats:
    """(R - mean)/mean of the group; 0 where the mean is not positive (MaxRL)."""
    mean = groups.rewards - groups.centred
    advantage = np.where(mean > 0, groups.centred / np.where(mean > 0, mean, 1), 0)
    return _finish(groups, advantage, global_std, neg_clipped)


def reinforce_pp(groups: RewardGroups, *, neg_clipped: bool) -> Floats:
    """R whitened over the batch: the return-to-go of an outcome reward with γ = 1 (REINFORCE++, Hu et al. 2025)."""
    return _finish(groups, _whitened(groups.rewards), False, neg_clipped)


def reinforce_pp_baseline(groups: RewardGroups, *, neg_clipped: bool) -> Floats:
    """R - mean of the group, whitened over the batch (REINFORCE++-baseline)."""
    return _finish(groups, _whitened(groups.centred), False, neg_clipped)


def reward(groups: RewardGroups, *, global_std: bool, neg_clipped: bool) -> Floats:
    """R (REINFORCE without a baseline)."""
    return _finish(groups, groups.rewards, global_std, neg_clipped)


def _per_token(groups: RewardGroups, **options: Any) -> Floats:
    raise ValueError("advantage gae is estimated per token, from a critic's values: call rlrun.algorithms.gae")


FUNCTIONS: Mapping[str, Callable[..., Floats]] = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "opo": opo,
    "max_rl": max_rl,
    "reinforce_pp": reinforce_pp,
    "reinforce_pp_baseline": reinforce_pp_baseline,
    "reward": reward,
    "gae": _per_token,
}
ADVANTAGES = builtins("advantage", FUNCTIONS)
SHAPING = ("turn_discount", "length_penalty")
"""Options of every estimator above that change the rewards before it sees them."""


def _shaped(
    rewards: Floats, lengths: Floats | None, turns: Floats | None, turn_discount: float, length_penalty: float
) -> Floats:
    """R·γ^(turns - 1) - penalty·L."""
    if turns is not None:
        rewards = rewards * turn_discount ** (turns - 1)
    if length_penalty == 0:
        return rewards
    if lengths is None:
        raise ValueError("lengths must be given where length_penalty > 0")
    return rewards - length_penalty * lengths


def _whitened(values: Floats) -> Floats:
    """Less the mean, divided by the unbiased standard deviation + 1e-6; a single value becomes 0."""
    centred = values - values.mean() if len(values) else values
    return centred / (values.std(ddof=1) + STD_FLOOR) if len(values) > 1 else centred


def _counts(name: str, counts: npt.ArrayLike | None, rewards: Floats, *, least: int) -> Floats | None:
    if counts is None:
        return None
    values = _vector(name, counts)
    if len(values) != len(rewards):
        raise ValueError(f"{name} has {len(values)} entries for {len(rewards)} rewards")
    if (values < least).any():
        raise ValueError(f"{name} must be at least {least}, got {values.min():g}")
    return values


def _finish(groups: RewardGroups, advantage: Floats, global_std: bool, neg_clipped: bool) -> Floats:
    if global_std and len(advantage) > 1:
        advantage = advantage / (groups.rewards.std(ddof=1) + STD_FLOOR)
    return np.maximum(advantage, 0) if neg_clipped else advantage


def _vector(name: str, values: npt.ArrayLike) -> Floats:
    vector = np.asarray(values, np.float64)
    if vector.ndim != 1:
        raise ValueError(f"{name} must have shape [N], got {list(vector.shape)}")
    if not np.isfinite(vector).all():
        where = int(np.flatnonzero(~np.isfinite(vector))[0])
        raise ValueError(f"{name} is not finite: {vector[where]:g} at {where}")
    return vector


def _groups(count: int, group_size: int | None, group_ids: npt.ArrayLike | None) -> tuple[Integers, int]:
    if (group_size is None) == (group_ids is None):
        raise ValueError("give either group_size (equal contiguous groups) or group_ids (any groups)")
    if group_size is not None:
        if group_size < 1 or count % group_size:
            raise ValueError(f"group_size must divide the number of rewards ({count}), got {group_size}")
        return np.arange(count) // group_size, count // group_size
    ids = np.asarray(group_ids)
    if ids.shape != (count,):
        raise ValueError(f"group_ids must have shape [{count}], got {list(ids.shape)}")
    if count and not np.issubdtype(ids.dtype, np.integer):
        raise ValueError(f"group_ids must be integers, got {ids.dtype}")
    known, inverse = np.unique(ids, return_inverse=True)
    return inverse.astype(np.int64), len(known)


def _returned(name: str, result: object, count: int) -> npt.NDArray[np.float32]:
    """What an estimator gave, checked: a user's own may return anything that numpy reads, a torch tensor on a CPU too."""
    try:
        values = np.asarray(result, np.float32)
    except (TypeError, ValueError, RuntimeError):
        values = np.empty(0, np.float32)
    if values.shape != (count,) or not np.isfinite(values).all():
        raise ValueError(f"advantage {name} must return {count} finite numbers, got {result}")
    return values
