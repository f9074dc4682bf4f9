"""Mean and standard deviation of values per group, over the batch, or none. Uses only numpy.

`level_means` and `level_stds` take sums per group, which a caller may first add up over ranks; `normalized` computes everything from
values of one process.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

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


def lowest(level: str, values: Floats, counted: npt.NDArray[np.bool_], group_ids: Integers, num_groups: int) -> Floats:
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


def normalized(values: Floats, *, weights: Floats, group_ids: Integers, num_groups: int, mean: str, std: str) -> Floats:
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
    values = values - lowest(mean, values, weights > 0, group_ids, num_groups)
    centred = values - level_means(mean, counts, sums(values))[group_ids]
    return centred / level_stds(std, counts, sums(np.square(centred)))[group_ids]
