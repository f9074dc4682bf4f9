"""Comparison of trained parameters and optimizer states with a checkpoint, on all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlrun.trainer.checkpoints.dcp import Part, Progress, load_parts, snapshot_shards
from rlrun.trainer.modeling.shard import local_part
from rlrun.trainer.ranks.group import Group


def count_changes(parts: Mapping[str, Part], checkpoint: Path, group: Group) -> dict[str, float]:
    """Load a checkpoint into the parts and count the changed tensors. The parts contain the checkpoint's values afterwards.

    Args:
        parts: trained modules and optimizers, by name.
        checkpoint: folder of the checkpoint of the same run and step.
        group: all ranks; all call this function together.

    Returns:
        Number of `tensors` and of `different` tensors (any bit differs) of parameters and optimizers, summed over ranks, and the
        `largest` absolute difference.
    """
    before = {name: tensor.clone() for name, tensor in _state_tensors(parts)}
    load_parts(parts, checkpoint)
    counts = {"tensors": 0.0, "different": 0.0}
    largest = 0.0
    for name, stored in _state_tensors(parts):
        found = before[name]
        counts["tensors"] += 1
        if not torch.equal(found, stored):
            counts["different"] += 1
            largest = max(largest, float((found.double() - stored.double()).abs().max()))
    return group.sums(counts) | group.maxima({"largest": largest})


def _state_tensors(parts: Mapping[str, Part]) -> list[tuple[str, Tensor]]:
    state = snapshot_shards(parts, Progress())
    return [
        (name, local_part(value.detach()))
        for name, value in _leaf_tensors("", {key: value for key, value in state.items() if key != "progress"})
    ]


def _leaf_tensors(path: str, value: Any) -> list[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        return [(path, value)]
    if isinstance(value, dict):
        return [leaf for key, one in value.items() for leaf in _leaf_tensors(f"{path}/{key}", one)]
    return []
