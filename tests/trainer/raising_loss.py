"""Custom losses that fail in the middle of a step."""

from __future__ import annotations

import torch.distributed as dist

from rlrun.algorithms.loss_inputs import LossInputs
from rlrun.algorithms.losses import TokenLoss, aipo

_calls: list[int] = []


def raises_on_the_second_row(inputs: LossInputs) -> TokenLoss:
    """Compute the loss `aipo` and raise from the third call on; the first call is the check at the start of a run."""
    _calls.append(1)
    if len(_calls) > 2:
        raise ZeroDivisionError("division by zero")
    return aipo(inputs, delta=8.0)


def raises_on_rank_one(inputs: LossInputs) -> TokenLoss:
    """Compute the loss `aipo` and raise only on rank 1, after the check at the start of a run."""
    _calls.append(1)
    if len(_calls) > 2 and dist.get_rank() == 1:
        raise ZeroDivisionError("division by zero")
    return aipo(inputs, delta=8.0)
