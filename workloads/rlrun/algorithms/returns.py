"""Advantages and returns on tensors: one advantage per rollout, and returns-to-go, GAE and whitening per token.

Advantages of rollouts come from `rlrun.advantages`, which the orchestrator uses with numpy.

The other functions take packed tensors `[T]`. Tokens outside the mask (prompts, tool results) are skipped: they have no discount, no reward
and no value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rlrun import advantages as on_arrays
from rlrun.algorithms.loss_inputs import checked_lengths


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
        _to_array(rewards),
        group_size=group_size,
        group_ids=None if group_ids is None else _to_array(group_ids),
        lengths=None if lengths is None else _to_array(lengths),
        turns=None if turns is None else _to_array(turns),
        **options,
    )
    return torch.from_numpy(values).to(rewards.device if isinstance(rewards, Tensor) else "cpu")


def _to_array(values: Tensor | Sequence[float]) -> npt.NDArray[np.generic]:
    """Convert values to a numpy array; numpy supports neither bf16 nor GPUs."""
    if not isinstance(values, Tensor):
        return np.asarray(values)
    plain = values.detach().cpu()
    array: npt.NDArray[np.generic] = (plain.double() if plain.is_floating_point() else plain).numpy()
    return array


STD_FLOOR = 1e-6


class Estimate(NamedTuple):
    """Advantages and returns, both `[T]` and 0 outside the mask. The returns are the critic's targets and are never whitened."""

    advantages: Tensor
    returns: Tensor


@dataclass(frozen=True)
class Moments:
    """Count, sum and sum of squares of masked values, float64 scalars. Moments of several parts can be added."""

    count: Tensor
    total: Tensor
    squares: Tensor

    @classmethod
    def from_values(cls, values: Tensor, mask: Tensor) -> Moments:
        """Compute the moments of `values` `[T]` inside `mask` `[T]`."""
        kept = torch.where(mask.bool(), values.detach().double(), 0)
        return cls(mask.bool().sum().double(), kept.sum(), kept.square().sum())

    def __add__(self, other: Moments) -> Moments:
        return Moments(self.count + other.count, self.total + other.total, self.squares + other.squares)

    @property
    def mean(self) -> Tensor:
        """Mean, or 0 without values."""
        return self.total / self.count.clamp(min=1)

    @property
    def std(self) -> Tensor:
        """Unbiased standard deviation, or 0 for fewer than two values."""
        spread = self.squares - self.count * self.mean.square()
        return (spread.clamp(min=0) / (self.count - 1).clamp(min=1)).sqrt()


def whiten(values: Tensor, mask: Tensor, moments: Moments | None = None) -> Tensor:
    """Return (value - mean)/(std + 1e-6) of the masked tokens, `[T]`, and 0 elsewhere.

    Pass the `moments` of the whole batch if `values` is only a part of it. Default: the moments of `values`.
    """
    _same_shape("mask", mask, values)
    found = Moments.from_values(values, mask) if moments is None else moments
    scaled = (values.double() - found.mean) / (found.std + STD_FLOOR)
    return torch.where(mask.bool(), scaled, 0).to(values.dtype)


def returns_to_go(
    rewards: Tensor, *, mask: Tensor, sequence_lengths: Sequence[int], gamma: float = 1.0, whitened: bool = False
) -> Tensor:
    """Return the discounted sum of rewards from each token to the end of its sequence, `[T]`, 0 outside the mask.

    Args:
        rewards: rewards of the tokens, `[T]`; values outside the mask are ignored.
        mask: sampled tokens, `[T]` bool.
        sequence_lengths: S positive lengths with sum T.
        gamma: discount per token, in [0, 1].
        whitened: whitening over these tokens, as in REINFORCE++.

    Raises:
        ValueError: an argument is invalid; the message contains its name.
    """
    _check_share("gamma", gamma)
    rewards = _check_finite("rewards", rewards)
    result = _sum_backwards(rewards, mask, sequence_lengths, gamma)
    return whiten(result, mask) if whitened else result


def gae(
    rewards: Tensor,
    values: Tensor,
    *,
    mask: Tensor,
    sequence_lengths: Sequence[int],
    gamma: float = 1.0,
    lam: float = 1.0,
    whitened: bool = True,
    final_values: Tensor | None = None,
) -> Estimate:
    """Generalized advantage estimation (Schulman et al. 2016, eq. 16).

    Args:
        rewards: rewards of the tokens, `[T]`; values outside the mask are ignored.
        values: critic's value before each token, `[T]`; values outside the mask are ignored.
        mask: sampled tokens, `[T]` bool.
        sequence_lengths: S positive lengths with sum T.
        gamma, lam: γ and λ in [0, 1].
        whitened: whitening over these tokens. For a part of a batch pass False, and call `whiten` with the moments of all parts.
        final_values: value after the last masked token of each sequence, `[S]`: 0 if the episode ended, the critic's value if a token
            limit truncated the answer. Default: 0.

    Raises:
        ValueError: an argument is invalid; the message contains its name.
    """
    _check_share("gamma", gamma)
    _check_share("lam", lam)
    rewards, values = _check_finite("rewards", rewards), _check_finite("values", values)
    _same_shape("values", values, rewards)
    kept = mask.bool()
    _same_shape("mask", mask, rewards)
    lengths = checked_lengths(sequence_lengths, len(rewards))
    final = values.new_zeros(len(lengths)) if final_values is None else _check_finite("final_values", final_values)
    if final.shape != (len(lengths),):
        raise ValueError(f"final_values must have shape [{len(lengths)}], got {list(final.shape)}")
    following = _next_masked(values, kept, lengths, final.to(values.dtype))
    deltas = torch.where(kept, rewards + gamma * following - values, 0)
    advantages = _sum_backwards(deltas, mask, sequence_lengths, gamma * lam)
    returns = torch.where(kept, advantages + values, 0)
    return Estimate(whiten(advantages, mask) if whitened else advantages, returns)


def _next_masked(values: Tensor, kept: Tensor, lengths: Sequence[int], final: Tensor) -> Tensor:
    """Return the value at the next masked token of the sequence for each masked token, `[T]`; `final` for the last one."""
    places, sequence = _masked_positions(kept, lengths)
    following = final[sequence]
    following[:-1] = torch.where(sequence[1:] == sequence[:-1], values[places[1:]], following[:-1])
    result = torch.zeros_like(values)
    result[places] = following
    return result


def _masked_positions(kept: Tensor, lengths: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return positions and sequence indices of the N masked tokens, both `[N]` int64."""
    places = kept.nonzero()[:, 0]
    return places, torch.repeat_interleave(torch.tensor(list(lengths), dtype=torch.long)).to(kept.device)[places]


def _sum_backwards(values: Tensor, mask: Tensor, sequence_lengths: Sequence[int], decay: float) -> Tensor:
    """Compute y_j = x_j + decay·y_{next masked} over the masked tokens of each sequence, for all tokens in parallel.

    A scan by doubling (Hillis and Steele 1986): after k passes y_j is the sum over the 2^k masked tokens from j on, so log2 of the
    longest sequence passes are enough. The sums are float64, whose rounding is far below the precision of the result.
    """
    _same_shape("mask", mask, values)
    lengths = checked_lengths(sequence_lengths, len(values))
    places, sequence = _masked_positions(mask.bool(), lengths)
    running = values.detach()[places].double()
    distance, factor = 1, decay
    while factor and distance < min(len(places), max(lengths, default=0)):
        later = torch.where(sequence[distance:] == sequence[:-distance], running[distance:], 0)
        running = torch.cat([running[:-distance] + factor * later, running[-distance:]])
        distance, factor = 2 * distance, factor * factor
    result = torch.zeros_like(values)
    result[places] = running.to(values.dtype)
    return result


def _check_share(name: str, value: float) -> None:
    if not 0.0 <= value <= 1.0:
        raise ValueError(f"{name} must be at least 0 and at most 1, got {value}")


def _check_finite(name: str, values: Tensor) -> Tensor:
    """Detach `values` and convert them to at least fp32; raise ValueError unless they are `[T]` and finite."""
    if values.dim() != 1:
        raise ValueError(f"{name} must be packed, of shape [T]; got {tuple(values.shape)}")
    if not bool(torch.isfinite(values).all()):
        where = int((~torch.isfinite(values)).nonzero()[0])
        raise ValueError(f"{name} is not finite: {values[where].item()} at token {where}")
    return values.detach().to(torch.promote_types(values.dtype, torch.float32))


def _same_shape(name: str, tensor: Tensor, other: Tensor) -> None:
    if tensor.shape != other.shape:
        raise ValueError(f"{name} must have shape {list(other.shape)}, got {list(tensor.shape)}")
