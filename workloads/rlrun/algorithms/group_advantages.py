"""Advantages of whole rollouts on tensors: `rlrun.advantages`, whose numbers the orchestrator makes, for code that has torch."""

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
    """One advantage per rollout, `[N]` fp32 without a gradient, where `rewards` are; see `rlrun.advantages.advantages`.

    Raises:
        ValueError: names the argument that is misaligned, not finite, unknown or out of range.
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
    """The values as numpy reads them, which knows neither bf16 nor other devices."""
    if not isinstance(values, Tensor):
        return np.asarray(values)
    plain = values.detach().cpu()
    array: npt.NDArray[np.generic] = (plain.double() if plain.is_floating_point() else plain).numpy()
    return array
