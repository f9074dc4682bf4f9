"""Exact aggregation of metrics over micro-batches and ranks.

`policy_loss` returns sums over its loss tokens, the number of these tokens (`tokens`) and the number of sequences that contain one
(`sequences`); metrics with a name in `_max` are maxima. The sums are added first and divided once, so the result does not depend on the
division into micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

COUNTS = ("tokens", "sequences")


def merge_metrics(parts: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Merge the metrics of several parts: add sums and counts, take the maximum of `*_max`."""
    merged: dict[str, Tensor] = {}
    for part in parts:
        for name, value in part.items():
            if name not in merged:
                merged[name] = value
            else:
                merged[name] = torch.maximum(merged[name], value) if name.endswith("_max") else merged[name] + value
    return merged


def mean_metrics(merged: Mapping[str, Tensor]) -> dict[str, float]:
    """Return reported means: sums divided by `tokens`, unchanged counts and `*_max`. Without tokens, all are 0."""
    return joint_means([{name: float(value) for name, value in merged.items()}])


def joint_means(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return `mean_metrics` of several objectives, each with its own tokens.

    A metric of only some objectives is a mean over their tokens. `loss` is divided already and is added.
    """
    found: dict[str, float] = {}
    for name in dict.fromkeys(name for part in parts for name in part):
        having = [part for part in parts if name in part]
        values = [part[name] for part in having]
        if name.endswith("_max"):
            found[name] = max(values)
        elif name == "loss" or name in COUNTS:
            found[name] = sum(values)
        else:
            found[name] = sum(values) / max(sum(part["tokens"] for part in having), 1.0)
    return found
