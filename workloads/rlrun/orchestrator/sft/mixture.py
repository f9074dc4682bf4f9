"""Order of the drawn rows, a pure function of the seed and the number of the draw, so that a resume needs only this
number.

Sources take turns by their weights, as evenly as complete rows allow. Within a source each epoch visits all rows once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import NamedTuple

from rlrun.orchestrator.tasks.permutation import permute_position, share_out


class Draw(NamedTuple):
    """Result of a draw."""

    source: int
    """Index of the source."""
    row: int
    """Index of the row in the source."""
    epoch: int
    """Number of complete passes over its rows before this draw."""


@dataclass(frozen=True)
class Mixture:
    """Order of all rows of a run.

    Args:
        seed: seed of the run.
        sizes: number of rows of each source.
        weights: relative shares of rows, positive numbers.
        shuffle: whether each epoch has a new order; otherwise the order of the files.
        epochs: number of passes over the data. None: unlimited.
        all_exhausted: whether the mixture ends when all sources are exhausted, instead of the first one.
    """

    seed: int
    sizes: tuple[int, ...]
    weights: tuple[float, ...]
    shuffle: bool = True
    epochs: int | None = None
    all_exhausted: bool = False

    def draw(self, number: int) -> Draw:
        """Return the result of draw `number` (from 0)."""
        source, index = share_out(number, self._shares)
        epoch, position = divmod(index, self.sizes[source])
        if not self.shuffle:
            return Draw(source, position, epoch)
        return Draw(source, permute_position(position, self.sizes[source], f"{self.seed}/data/{source}/{epoch}"), epoch)

    def counts(self, number: int) -> tuple[int, ...]:
        """Return the number of rows of each source among the first `number` draws."""
        return tuple(_count_shares(number, self._shares))

    @cached_property
    def length(self) -> int | None:
        """Number of draws until the mixture ends, or None if it never ends."""
        if self.epochs is None:
            return None
        low, high = 0, 1
        while not self._ended(high):
            high *= 2
        while high - low > 1:  # binary search: the counts only increase
            middle = (low + high) // 2
            low, high = (low, middle) if self._ended(middle) else (middle, high)
        return high

    def _ended(self, number: int) -> bool:
        read = [count >= size * (self.epochs or 0) for count, size in zip(self.counts(number), self.sizes, strict=True)]
        return all(read) if self.all_exhausted else any(read)

    @cached_property
    def _shares(self) -> list[Fraction]:
        return [Fraction(str(weight)) for weight in self.weights]


def _count_shares(number: int, weights: Sequence[Fraction]) -> list[int]:
    """Compute the forks of `share_out` for all sources at once."""
    if len(weights) == 1:
        return [number]
    middle = len(weights) // 2
    left = sum(weights[:middle], Fraction(0))
    first = int(number * (left / sum(weights, Fraction(0))))
    return [*_count_shares(first, weights[:middle]), *_count_shares(number - first, weights[middle:])]
