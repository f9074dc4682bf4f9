"""Optimizer steps over a part of the parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

Visit = Callable[[Sequence[nn.Parameter]], Iterator[Sequence[nn.Parameter]]]
"""Function that iterates over parts of parameters; the states of a part are on the device until the next part is requested."""


def at_once(parameters: Sequence[nn.Parameter]) -> Iterator[Sequence[nn.Parameter]]:
    """Return all parameters as one part, because their states are always on the device."""
    yield parameters


def step_part(optimizer: torch.optim.Optimizer, groups: Sequence[dict[str, Any]], part: Sequence[nn.Parameter]) -> None:
    """Update only the parameters of `part`; for optimizers that treat each parameter independently.

    Args:
        optimizer: optimizer, whose groups are `groups` afterwards.
        groups: groups with all parameters.
        part: parameters to update.
    """
    chosen = set(map(id, part))
    rest = [{**group, "params": [p for p in group["params"] if id(p) in chosen]} for group in groups]
    optimizer.param_groups = [group for group in rest if group["params"]]
    try:
        if optimizer.param_groups:
            optimizer.step()
    finally:
        optimizer.param_groups = list(groups)
