"""Order of the drawn rows: a pure function of the seed and the number of the draw, so that one number is all there is to resume from.

Sources take turns by their weights, as evenly as whole rows allow; within a source each epoch visits all rows once.
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
    """Index of the row in it."""
    epoch: int
    """Number of times that all its rows were drawn before."""


@dataclass(frozen=True)
class Mixture:
    """The order of all rows of a run.

    Args:
        seed: the run's seed.
        sizes: rows of each source.
        weights: shares of rows, any positive numbers.
        shuffle: a new order in each epoch; otherwise always that of the files.
        epochs: how often the data is read; None: for ever.
        all_exhausted: the mixture ends when all sources were read that often, otherwise when the first one was.
    """

    seed: int
    sizes: tuple[int, ...]
    weights: tuple[float, ...]
    shuffle: bool = True
    epochs: int | None = None
    all_exhausted: bool = False

    def draw(self, number: int) -> Draw:
        """Result of draw `number` (from 0)."""
        source, index = share_out(number, self._shares)
        epoch, position = divmod(index, self.sizes[source])
        if not self.shuffle:
            return Draw(source, position, epoch)
        return Draw(source, permute_position(position, self.sizes[source], f"{self.seed}/data/{source}/{epoch}"), epoch)

    def counts(self, number: int) -> tuple[int, ...]:
        """Rows of each source among the first `number` draws."""
        return tuple(_count_shares(number, self._shares))

    @cached_property
    def length(self) -> int | None:
        """Draws until the mixture ends; None: it does not."""
        if self.epochs is None:
            return None
        low, high = 0, 1
        while not self._ended(high):
            high *= 2
        while high - low > 1:  # the counts only grow, so the first draw that reaches them is found by halving
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
    """The forks of `share_out`, for all sources at once."""
    if len(weights) == 1:
        return [number]
    middle = len(weights) // 2
    left = sum(weights[:middle], Fraction(0))
    first = int(number * (left / sum(weights, Fraction(0))))
    return [*_count_shares(first, weights[:middle]), *_count_shares(number - first, weights[middle:])]
