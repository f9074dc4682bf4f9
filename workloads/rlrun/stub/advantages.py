"""`rlrun.algorithms.advantages` for the built-in estimators, without torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from rlrun.config.algorithm_names import complete_options, is_import_path

STD_FLOOR = 1e-6
_Values = npt.NDArray[np.float64]


def advantages(
    name: str,
    rewards: Sequence[float],
    *,
    group_ids: Sequence[int],
    lengths: Sequence[int],
    turns: Sequence[int] | None = None,
    **options: Any,
) -> npt.NDArray[np.float32]:
    """One advantage per rollout, `[N]` fp32; formulas and arguments as in `rlrun.algorithms.advantages`.

    Raises:
        ValueError: the name or an option is unknown, or the name is an import path: such a function works on torch's tensors.
    """
    if is_import_path(name):
        raise ValueError(f"{name} needs torch, which the stub image does not hold; use a built-in advantage")
    complete = complete_options("advantage", name, options)
    values, weights = np.asarray(rewards, np.float64), np.asarray(lengths, np.float64)
    if turns is not None:
        values = values * complete["turn_discount"] ** (np.asarray(turns, np.float64) - 1)
    values = values - complete["length_penalty"] * weights
    _, ids = np.unique(np.asarray(group_ids), return_inverse=True)

    def total(of: _Values) -> _Values:
        sums = np.bincount(ids, weights=of).astype(np.float64)
        return sums[ids]

    sizes = total(np.ones_like(values))
    centred = values - total(values) / sizes
    others = np.maximum(sizes - 1, 1)
    alone = sizes == 1
    match name:
        case "grpo":
            result = centred
            if complete["std"] == "group":
                deviation = np.sqrt(total(centred**2) / others) + STD_FLOOR
                result = centred / np.where(alone, 1.0, deviation)
        case "dr_grpo":
            result = centred
        case "rloo":
            result = np.where(alone, values, centred * sizes / others)
        case "max_rl":
            mean = values - centred
            result = np.where(mean > 0, centred / np.where(mean > 0, mean, 1), 0)
        case "reinforce_pp":
            result = _whitened(values)
        case "reinforce_pp_baseline":
            result = _whitened(centred)
        case "reward":
            result = values
        case _:
            result = _opo(values, centred, weights, alone, total, leave_one_out=bool(complete["leave_one_out"]))
    if complete.get("global_std") and len(result) > 1:
        result = result / (values.std(ddof=1) + STD_FLOOR)
    if complete["neg_clipped"]:
        result = np.maximum(result, 0)
    return np.asarray(result, np.float32)


def _whitened(values: _Values) -> _Values:
    centred = values - values.mean() if len(values) else values
    return centred / (values.std(ddof=1) + STD_FLOOR) if len(values) > 1 else centred


def _opo(
    values: _Values,
    centred: _Values,
    lengths: _Values,
    alone: npt.NDArray[np.bool_],
    total: Any,
    *,
    leave_one_out: bool,
) -> _Values:
    weighted = centred * lengths
    sums, length = total(weighted), total(lengths)
    if not leave_one_out:
        return np.asarray(centred - sums / length)
    rest = np.maximum(length - lengths, 1)
    return np.where(alone, values, centred - (sums - weighted) / rest)
