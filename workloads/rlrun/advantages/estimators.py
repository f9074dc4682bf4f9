"""Advantage estimators, and the means and standard deviations that they use; without torch.

Means and standard deviations are over the group, over the batch, or omitted. `level_means` and `level_stds` take sums per group, which a
caller may first add up over ranks; `normalize_values` computes everything from values of one process.

An estimator returns one advantage per rollout from the rewards of its group. `estimate.py` distributes it over tokens and normalizes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rlrun.custom import builtins

STD_FLOOR = 1e-6
"""Constant added to every standard deviation before a division."""
Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]


def level_means(level: str, counts: Floats, totals: Floats) -> Floats:
    """Return the mean to subtract from the members of each group, `[K]`; 0 for an empty group.

    Args:
        level: `group`, `batch` or `none`.
        counts: number of values of each group, `[K]`.
        totals: sum of the values of each group, `[K]`.
    """
    if level == "none":
        return np.zeros_like(totals)
    if level == "batch":
        counts, totals = np.full_like(counts, counts.sum()), np.full_like(totals, totals.sum())
    means: Floats = totals / np.maximum(counts, 1)
    return means


def level_stds(level: str, counts: Floats, squares: Floats) -> Floats:
    """Return the divisor of the values of each group, `[K]`: the unbiased standard deviation + 1e-6; 1 for fewer than two values.

    Args:
        level: `group`, `batch` or `none`.
        counts: number of values of each group, `[K]`.
        squares: sum of squared differences from the mean of `level_means`, `[K]`; the deviation is relative to the subtracted mean at its
            level (AReaL's adv_norm).
    """
    if level == "none":
        return np.ones_like(squares)
    if level == "batch":
        counts, squares = np.full_like(counts, counts.sum()), np.full_like(squares, squares.sum())
    return np.where(counts > 1, np.sqrt(squares / np.maximum(counts - 1, 1)) + STD_FLOOR, 1.0)


def lowest_of_level(
    level: str, values: Floats, counted: npt.NDArray[np.bool_], group_ids: Integers, num_groups: int
) -> Floats:
    """Return the smallest counted value of the group or batch, repeated for its members, `[N]`; 0 at level `none` and without counted
    values.

    It is subtracted before the mean, so that equal values of any size differ from their mean by exactly 0: the rounding error of a sum of
    values near 1e9 is at least `STD_FLOOR`.
    """
    if level == "none" or not counted.any():
        return np.zeros_like(values)
    if level == "batch":
        return np.full_like(values, values[counted].min())
    least = np.full(num_groups, np.inf)
    np.minimum.at(least, group_ids[counted], values[counted])
    return np.where(np.isfinite(least), least, 0.0)[group_ids]


def normalize_values(
    values: Floats, *, weights: Floats, group_ids: Integers, num_groups: int, mean: str, std: str
) -> Floats:
    """Return (value - mean) / (std + 1e-6), `[N]`.

    Args:
        values: one value per rollout or token, `[N]`.
        weights: multiplicity of each value, `[N]`: 1 for a rollout, or its number of loss tokens.
        group_ids: group of each value, `[N]` in 0..num_groups-1.
        num_groups: number K of groups.
        mean: level of the subtracted mean: `group`, `batch` or `none`.
        std: level of the standard deviation: `group`, `batch` or `none`.
    """

    def sums(terms: Floats) -> Floats:
        return np.bincount(group_ids, weights=weights * terms, minlength=num_groups).astype(np.float64)

    counts = sums(np.ones_like(values))
    values = values - lowest_of_level(mean, values, weights > 0, group_ids, num_groups)
    centred = values - level_means(mean, counts, sums(values))[group_ids]
    return centred / level_stds(std, counts, sums(np.square(centred)))[group_ids]


@dataclass(frozen=True)
class RewardGroups:
    """N rewards in K groups as numpy arrays: `rewards` `[N]` fp64, `group_ids` `[N]` in 0..K-1, `lengths` `[N]` fp64 tokens or None.

    The arrays are fp64, because a group of equal rewards must result in 0 even after a division by 1e-6.
    """

    rewards: Floats
    group_ids: Integers
    num_groups: int
    lengths: Floats | None = None

    def sum(self, values: Floats) -> Floats:
        """Return the sum of `values` `[N]` over each group, repeated for its members, `[N]`."""
        totals = np.bincount(self.group_ids, weights=values, minlength=self.num_groups)
        return totals.astype(np.float64)[self.group_ids]

    @property
    def sizes(self) -> Floats:
        """Size G of each rollout's group, `[N]`."""
        return self.sum(np.ones_like(self.rewards))

    @property
    def centred(self) -> Floats:
        """R - mean of the group, `[N]`; exactly 0 if all rewards of the group are equal."""
        above = self.rewards - lowest_of_level(
            "group", self.rewards, np.ones(len(self.rewards), np.bool_), self.group_ids, self.num_groups
        )
        return above - self.sum(above) / self.sizes

    def quantile(self, share: float) -> Floats:
        """Return the smallest reward of each group that at least `share` of its rewards do not exceed, repeated for its members, `[N]`.

        `share` is above 0 and at most 1. The result is always a reward of the group: no interpolation.
        """
        order = np.lexsort((self.rewards, self.group_ids))
        counts = np.bincount(self.group_ids, minlength=self.num_groups)
        # A product such as 0.55·100 is a little above the whole number that it stands for.
        rank = np.maximum(np.ceil(share * counts - 1e-9).astype(np.int64), 1) - 1
        starts = np.cumsum(counts) - counts
        found: Floats = self.rewards[order[(starts + rank)[self.group_ids]]]
        return found


def grpo(groups: RewardGroups, *, mean: str, std: str) -> Floats:
    """R minus a mean, divided by a standard deviation; each over the group, the batch, or omitted.

    The default is R - mean of the group (Dr. GRPO's bias-free form); `std="group"` divides as in DeepSeekMath (Shao et al. 2024, section
    4.1).
    """
    return normalize_values(
        groups.rewards,
        weights=np.ones_like(groups.rewards),
        group_ids=groups.group_ids,
        num_groups=groups.num_groups,
        mean=mean,
        std=std,
    )


def dr_grpo(groups: RewardGroups) -> Floats:
    """R - mean (Liu et al. 2025); the constant length is part of the aggregation."""
    return groups.centred


def rloo(groups: RewardGroups) -> Floats:
    """(R - mean)·G/(G-1), which equals R minus the mean of the other rollouts (Ahmadian et al. 2024); R for a group of 1."""
    others = np.maximum(groups.sizes - 1, 1)
    return np.where(groups.sizes > 1, groups.centred * groups.sizes / others, groups.rewards)


def opo(groups: RewardGroups, *, leave_one_out: bool) -> Floats:
    """R - ΣR·L/ΣL, the baseline of least variance if the gradient's norm grows with length (OPO, Hao et al. 2025).

    With `leave_one_out` the baseline is (ΣRL - RL)/(ΣL - L), and a group of 1 keeps R. If ΣL is 0, the baseline is the group's mean.
    """
    if groups.lengths is None:
        raise ValueError("lengths must be given for advantage opo, which weights the baseline by length")
    # Subtracting the mean first does not change the definition, and gives exactly 0 for equal rewards.
    weighted = groups.centred * groups.lengths
    total, length = groups.sum(weighted), groups.sum(groups.lengths)
    if not leave_one_out:
        advantage: Floats = groups.centred - total / np.where(length > 0, length, 1)
        return advantage
    others = length - groups.lengths
    baseline = (total - weighted) / np.where(others > 0, others, 1)
    return np.where(groups.sizes > 1, groups.centred - baseline, groups.rewards)


def max_rl(groups: RewardGroups) -> Floats:
    """(R - mean)/mean of the group, limited to ±(G-1); 0 if the mean is not positive (MaxRL).

    MaxRL is defined for rewards that count successes. For nonnegative rewards the result is always within ±(G-1). Rewards of both signs
    can have a mean close to 0: then the whole group is scaled to the limit, and a mean within the rounding error of the sum counts as 0.
    """
    centred, mean = groups.centred, groups.sum(groups.rewards) / groups.sizes
    rounding = np.finfo(np.float64).eps * groups.sum(np.abs(groups.rewards))
    farthest = np.zeros(groups.num_groups)
    np.maximum.at(farthest, groups.group_ids, np.abs(centred))
    divisor = np.maximum(mean, farthest[groups.group_ids] / np.maximum(groups.sizes - 1, 1))
    positive = mean > rounding
    return np.where(positive, centred / np.where(positive, divisor, 1), 0)


def qae(groups: RewardGroups, *, quantile: float) -> Floats:
    """R - quantile of the group's rewards (quantile advantage estimation, Wu et al. 2025, arXiv:2509.22611); 0 for a group of 1.

    For rewards of 0 and 1 with a share p of successes: if p <= 1 - quantile, only successes have an advantage (1), otherwise only failures
    (-1). The paper also divides by the standard deviation of the group's rewards, which this function does not.
    """
    return groups.rewards - groups.quantile(quantile)


def reward(groups: RewardGroups) -> Floats:
    """R (REINFORCE without a baseline)."""
    return groups.rewards


def _per_token(groups: RewardGroups, **options: object) -> Floats:
    raise ValueError("advantage gae is estimated per token, from a critic's values: call rlrun.algorithms.gae")


FUNCTIONS: Mapping[str, Callable[..., Floats]] = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "opo": opo,
    "max_rl": max_rl,
    "qae": qae,
    "reinforce_pp": reward,
    "reinforce_pp_baseline": dr_grpo,
    "reward": reward,
    "gae": _per_token,
}
"""Functions of the estimators. `reinforce_pp` and its baseline differ from `reward` and `dr_grpo` only in `adv_mean`, `adv_std` and
`gamma` (Hu et al. 2025).
"""
ADVANTAGES = builtins("advantage", FUNCTIONS)
