"""An optimizer's step over some of its parameters at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

Visit = Callable[[Sequence[nn.Parameter]], Iterator[Sequence[nn.Parameter]]]
"""Parts of some parameters, one after the other; the states of a part are on the device until the next is asked for."""


def at_once(parameters: Sequence[nn.Parameter]) -> Iterator[Sequence[nn.Parameter]]:
    """All of them as one part: their states are on the device anyway."""
    yield parameters


def step_part(optimizer: torch.optim.Optimizer, groups: Sequence[dict[str, Any]], part: Sequence[nn.Parameter]) -> None:
    """Update the parameters of `part` alone; for an optimizer that treats each parameter by itself.

    Args:
        optimizer: its groups are `groups` afterwards.
        groups: all of its parameters.
        part: some of them.
    """
    chosen = set(map(id, part))
    rest = [{**group, "params": [p for p in group["params"] if id(p) in chosen]} for group in groups]
    optimizer.param_groups = [group for group in rest if group["params"]]
    try:
        if optimizer.param_groups:
            optimizer.step()
    finally:
        optimizer.param_groups = list(groups)
