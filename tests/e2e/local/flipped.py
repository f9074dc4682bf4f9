"""Custom advantage by import path: GRPO's with the wrong sign."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from rlrun.advantages import RewardGroups


def advantages(groups: RewardGroups) -> npt.NDArray[np.float64]:
    """Return the negated group-mean advantage, `[N]`."""
    return -groups.centred
