"""Advantages and returns per token, on packed tensors `[T]`: returns-to-go, GAE, whitening.

Tokens outside the mask (prompts, tool results) are passed over: neither discounted, nor rewarded, nor valued.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from rlrun.algorithms.inputs import checked_lengths

STD_FLOOR = 1e-6


class Estimate(NamedTuple):
    """Both `[T]`, 0 outside the mask. The returns are what the critic learns; they are never whitened."""

    advantages: Tensor
    returns: Tensor


@dataclass(frozen=True)
class Moments:
    """Count, sum and sum of squares of masked values, scalars in float64; those of several parts add up."""

    count: Tensor
    total: Tensor
    squares: Tensor

    @classmethod
    def of(cls, values: Tensor, mask: Tensor) -> Moments:
        """Moments of `values` `[T]` where `mask` `[T]` is true."""
        kept = torch.where(mask.bool(), values.detach().double(), 0)
        return cls(mask.bool().sum().double(), kept.sum(), kept.square().sum())

    def __add__(self, other: Moments) -> Moments:
        return Moments(self.count + other.count, self.total + other.total, self.squares + other.squares)

    @property
    def mean(self) -> Tensor:
        """The mean; 0 of nothing."""
        return self.total / self.count.clamp(min=1)

    @property
    def std(self) -> Tensor:
        """The unbiased standard deviation; 0 of less than two values."""
        spread = self.squares - self.count * self.mean.square()
        return (spread.clamp(min=0) / (self.count - 1).clamp(min=1)).sqrt()


def whiten(values: Tensor, mask: Tensor, moments: Moments | None = None) -> Tensor:
    """(value - mean)/(std + 1e-6) over the masked tokens, `[T]`, 0 elsewhere.

    `moments` are those of the whole batch where `values` is only a part of it; default: of `values`.
    """
    _same_shape("mask", mask, values)
    found = Moments.of(values, mask) if moments is None else moments
    scaled = (values.double() - found.mean) / (found.std + STD_FLOOR)
    return torch.where(mask.bool(), scaled, 0).to(values.dtype)


def returns_to_go(
    rewards: Tensor, *, mask: Tensor, sequence_lengths: Sequence[int], gamma: float = 1.0, whitened: bool = False
) -> Tensor:
    """Σ over later tokens of the sequence of γ^(tokens between)·reward, `[T]`, 0 outside the mask.

    Args:
        rewards: `[T]`; those outside the mask are not looked at.
        mask: `[T]` bool, the tokens that the policy sampled.
        sequence_lengths: S positive lengths that add up to T.
        gamma: discount per token, in [0, 1].
        whitened: over these tokens, as REINFORCE++ has it.

    Raises:
        ValueError: names the argument.
    """
    _share("gamma", gamma)
    rewards = _finite("rewards", rewards)
    result = _backwards(rewards, mask, sequence_lengths, gamma)
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
    """Generalised advantage estimation (Schulman et al. 2016, eq. 16).

    Args:
        rewards: `[T]`; those outside the mask are not looked at.
        values: `[T]`, the critic's value before each token; those outside the mask are not looked at.
        mask: `[T]` bool, the tokens that the policy sampled.
        sequence_lengths: S positive lengths that add up to T.
        gamma, lam: γ and λ in [0, 1].
        whitened: over these tokens. For a part of a batch say False and call `whiten` with the moments of all parts.
        final_values: `[S]`, the value after each sequence's last masked token: 0 if the episode ended there, the critic's value if a
            limit of tokens cut the answer. Default: 0.

    Raises:
        ValueError: names the argument.
    """
    _share("gamma", gamma)
    _share("lam", lam)
    rewards, values = _finite("rewards", rewards), _finite("values", values)
    _same_shape("values", values, rewards)
    kept = mask.bool()
    _same_shape("mask", mask, rewards)
    lengths = checked_lengths(sequence_lengths, len(rewards))
    final = values.new_zeros(len(lengths)) if final_values is None else _finite("final_values", final_values)
    if final.shape != (len(lengths),):
        raise ValueError(f"final_values must have shape [{len(lengths)}], got {list(final.shape)}")
    following = _next_masked(values, kept, lengths, final.to(values.dtype))
    deltas = torch.where(kept, rewards + gamma * following - values, 0)
    advantages = _backwards(deltas, mask, sequence_lengths, gamma * lam)
    returns = torch.where(kept, advantages + values, 0)
    return Estimate(whiten(advantages, mask) if whitened else advantages, returns)


def _next_masked(values: Tensor, kept: Tensor, lengths: Sequence[int], final: Tensor) -> Tensor:
    """Value at the next masked token of the sequence, for each masked token; the sequence's `final` after the last one; `[T]`."""
    places, sequence = _masked(kept, lengths)
    following = final[sequence]
    following[:-1] = torch.where(sequence[1:] == sequence[:-1], values[places[1:]], following[:-1])
    result = torch.zeros_like(values)
    result[places] = following
    return result


def _masked(kept: Tensor, lengths: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Positions of the N masked tokens, and the number of the sequence of each; both `[N]` int64."""
    places = kept.nonzero()[:, 0]
    return places, torch.repeat_interleave(torch.tensor(list(lengths), dtype=torch.long)).to(kept.device)[places]


def _backwards(values: Tensor, mask: Tensor, sequence_lengths: Sequence[int], decay: float) -> Tensor:
    """y_j = x_j + decay·y_{next masked}, over the masked tokens of each sequence; all tokens at once.

    A scan by doubling (Hillis and Steele 1986): after k passes y_j is the sum over the 2^k masked tokens from j on, so log2 of the longest
    sequence passes are enough. In float64, whose rounding is far below that of the result.
    """
    _same_shape("mask", mask, values)
    lengths = checked_lengths(sequence_lengths, len(values))
    places, sequence = _masked(mask.bool(), lengths)
    running = values.detach()[places].double()
    distance, factor = 1, decay
    while factor and distance < min(len(places), max(lengths, default=0)):
        later = torch.where(sequence[distance:] == sequence[:-distance], running[distance:], 0)
        running = torch.cat([running[:-distance] + factor * later, running[-distance:]])
        distance, factor = 2 * distance, factor * factor
    result = torch.zeros_like(values)
    result[places] = running.to(values.dtype)
    return result


def _share(name: str, value: float) -> None:
    if not 0.0 <= value <= 1.0:
        raise ValueError(f"{name} must be at least 0 and at most 1, got {value}")


def _finite(name: str, values: Tensor) -> Tensor:
    """`values` without a gradient, at least fp32. Raises ValueError unless they are `[T]` and finite."""
    if values.dim() != 1:
        raise ValueError(f"{name} must be packed, of shape [T]; got {tuple(values.shape)}")
    if not bool(torch.isfinite(values).all()):
        where = int((~torch.isfinite(values)).nonzero()[0])
        raise ValueError(f"{name} is not finite: {values[where].item()} at token {where}")
    return values.detach().to(torch.promote_types(values.dtype, torch.float32))


def _same_shape(name: str, tensor: Tensor, other: Tensor) -> None:
    if tensor.shape != other.shape:
        raise ValueError(f"{name} must have shape {list(other.shape)}, got {list(tensor.shape)}")
