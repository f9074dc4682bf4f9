"""How the metrics of micro-batches and ranks become those of a step, exactly.

`policy_loss` returns sums over its loss tokens next to the number of these tokens (`tokens`) and of the sequences that
have any (`sequences`); metrics whose name ends in `_max` are maxima. Adding up first and dividing once gives the
same numbers for every way of cutting a batch into micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

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
    """What a person reads: sums divided by `tokens`; counts and `*_max` as they are. Without tokens, all are 0."""
    tokens = max(float(merged["tokens"]), 1.0)
    kept = {name for name in merged if name in COUNTS or name.endswith("_max")}
    return {name: float(value) if name in kept else float(value) / tokens for name, value in merged.items()}
