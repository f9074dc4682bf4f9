"""Mean and standard deviation of values at a level: each group's own, the batch's, or none. Pure, numpy alone.

`levels` work on sums per group, so that a caller may add them up over ranks first; `normalized` is all of it for values at hand.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

STD_FLOOR = 1e-6
"""Added to every standard deviation that something is divided by."""
Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]


def level_means(level: str, counts: Floats, totals: Floats) -> Floats:
    """Values to subtract from the members of each group, `[K]`; 0 where there is no value.

    Args:
        level: `group`, `batch` or `none`.
        counts: `[K]`, how many values each group has.
        totals: `[K]`, their sums.
    """
    if level == "none":
        return np.zeros_like(totals)
    if level == "batch":
        counts, totals = np.full_like(counts, counts.sum()), np.full_like(totals, totals.sum())
    means: Floats = totals / np.maximum(counts, 1)
    return means


def level_stds(level: str, counts: Floats, squares: Floats) -> Floats:
    """Divisors of the values of each group, `[K]`: the unbiased standard deviation + 1e-6; 1 of fewer than two values.

    Args:
        level: `group`, `batch` or `none`.
        counts: `[K]`, how many values each group has.
        squares: `[K]`, the sums of their squared differences from what `level_means` says is subtracted, so that the spread is around
            the mean that is taken off, at whatever level that is (AReaL's adv_norm).
    """
    if level == "none":
        return np.ones_like(squares)
    if level == "batch":
        counts, squares = np.full_like(counts, counts.sum()), np.full_like(squares, squares.sum())
    return np.where(counts > 1, np.sqrt(squares / np.maximum(counts - 1, 1)) + STD_FLOOR, 1.0)


def lowest(level: str, values: Floats, counted: npt.NDArray[np.bool_], group_ids: Integers, num_groups: int) -> Floats:
    """The smallest counted value of the group or batch, repeated for each of its members, `[N]`; 0 at level `none` and where none counts.

    Taken off before a mean is, so that equal values of any size differ from their mean by exactly 0: the rounding of a sum of values near
    1e9 is no less than `STD_FLOOR`.
    """
    if level == "none" or not counted.any():
        return np.zeros_like(values)
    if level == "batch":
        return np.full_like(values, values[counted].min())
    least = np.full(num_groups, np.inf)
    np.minimum.at(least, group_ids[counted], values[counted])
    return np.where(np.isfinite(least), least, 0.0)[group_ids]


def normalized(values: Floats, *, weights: Floats, group_ids: Integers, num_groups: int, mean: str, std: str) -> Floats:
    """(value - mean) / (std + 1e-6), `[N]`.

    Args:
        values: `[N]`.
        weights: `[N]`, how often each value counts: 1 for a rollout, or its number of loss tokens.
        group_ids: `[N]` in 0..num_groups-1.
        num_groups: K.
        mean: level of what is subtracted: `group`, `batch` or `none`.
        std: level of what is divided by.
    """

    def sums(terms: Floats) -> Floats:
        return np.bincount(group_ids, weights=weights * terms, minlength=num_groups).astype(np.float64)

    counts = sums(np.ones_like(values))
    values = values - lowest(mean, values, weights > 0, group_ids, num_groups)
    centred = values - level_means(mean, counts, sums(values))[group_ids]
    return centred / level_stds(std, counts, sums(np.square(centred)))[group_ids]
