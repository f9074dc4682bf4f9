"""Exact aggregation of the metrics of micro-batches and ranks to those of a step.

`policy_loss` returns sums over its loss tokens next to the number of these tokens (`tokens`) and of the sequences that
have any (`sequences`); metrics whose name ends in `_max` are maxima. Adding up first and dividing once gives the
same numbers for every way of cutting a batch into micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

COUNTS = ("tokens", "sequences")


def merge_metrics(parts: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The metrics of the union of `parts`: sums and counts are added, `*_max` are maximised."""
    merged: dict[str, Tensor] = {}
    for part in parts:
        for name, value in part.items():
            if name not in merged:
                merged[name] = value
            else:
                merged[name] = torch.maximum(merged[name], value) if name.endswith("_max") else merged[name] + value
    return merged


def mean_metrics(merged: Mapping[str, Tensor]) -> dict[str, float]:
    """Reported means: sums divided by `tokens`; counts and `*_max` as they are. Without tokens, all are 0."""
    return joint_means([{name: float(value) for name, value in merged.items()}])


def joint_means(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """`mean_metrics` of the union of `parts`, each of other tokens by another objective.

    A metric that only some parts have is a mean over the tokens of these. `loss`, divided already, is added up.
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
