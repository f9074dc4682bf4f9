"""Custom loss whose native code crashes on one rank."""

from __future__ import annotations

import ctypes
import os

from rlrun.algorithms.loss_inputs import LossInputs
from rlrun.algorithms.losses import TokenLoss, aipo

_calls: list[int] = []


def crashes_on_rank_1(inputs: LossInputs) -> TokenLoss:
    """Compute the loss `aipo`; rank 1 reads address 0 at its second micro-batch. Two checks call the loss before the
    first micro-batch.
    """
    _calls.append(1)
    if os.environ["RANK"] == "1" and len(_calls) > 3:
        ctypes.string_at(0)
    return aipo(inputs, delta=8.0)
