"""Advantages of rollouts on tensors: a wrapper of `rlrun.advantages`, which the orchestrator uses with numpy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rlrun import advantages as on_arrays


def advantages(
    name: str,
    rewards: Tensor | Sequence[float],
    *,
    group_size: int | None = None,
    group_ids: Tensor | Sequence[int] | None = None,
    lengths: Tensor | Sequence[float] | None = None,
    turns: Tensor | Sequence[int] | None = None,
    **options: object,
) -> Tensor:
    """Return one advantage per rollout, `[N]` fp32 without a gradient, on the device of `rewards`; see `rlrun.advantages.advantages`.

    Raises:
        ValueError: an argument is misaligned, not finite, unknown or out of range; the message contains its name.
    """
    values = on_arrays.advantages(
        name,
        _array(rewards),
        group_size=group_size,
        group_ids=None if group_ids is None else _array(group_ids),
        lengths=None if lengths is None else _array(lengths),
        turns=None if turns is None else _array(turns),
        **options,
    )
    return torch.from_numpy(values).to(rewards.device if isinstance(rewards, Tensor) else "cpu")


def _array(values: Tensor | Sequence[float]) -> npt.NDArray[np.generic]:
    """Convert values to a numpy array; numpy supports neither bf16 nor GPUs."""
    if not isinstance(values, Tensor):
        return np.asarray(values)
    plain = values.detach().cpu()
    array: npt.NDArray[np.generic] = (plain.double() if plain.is_floating_point() else plain).numpy()
    return array
