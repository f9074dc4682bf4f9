"""Custom loss that never returns on one rank."""

from __future__ import annotations

import ctypes
import os

from rlrun.algorithms.loss_inputs import LossInputs
from rlrun.algorithms.losses import TokenLoss, aipo

_calls: list[int] = []


def hangs_on_rank_1(inputs: LossInputs) -> TokenLoss:
    """Compute the loss `aipo`; rank 1 blocks in native code, with the interpreter's lock, at its first micro-batch.
    One check calls the loss before it.
    """
    _calls.append(1)
    if os.environ["RANK"] == "1" and len(_calls) > 1:
        lock, mutex = ctypes.PyDLL(None).pthread_mutex_lock, ctypes.create_string_buffer(128)
        lock(mutex)
        lock(mutex)
    return aipo(inputs, delta=8.0)
