"""Cut of a model's layers into stages of nearly equal work. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import accumulate


def cut(layers: Sequence[float], head: float, stages: int) -> list[range]:
    """The layers of each stage, in order: runs of neighbours, of which the most costly costs least.

    Of cuts that are equal in this the one with the least in the first stages is taken: these keep activations of most micro-batches.

    Args:
        layers: cost of each layer, in any unit.
        head: cost of what the last stage has besides.
        stages: at most as many as layers.

    Raises:
        ValueError: there are more stages than layers.
    """
    count = len(layers)
    if not 1 <= stages <= count:
        raise ValueError(f"{count} layers cannot be cut into {stages} stages")
    sums = [0.0, *accumulate(layers)]

    @cache
    def best(start: int, left: int) -> tuple[float, tuple[int, ...]]:
        """Largest cost of the stages from layer `start` on, and where each of them ends."""
        if left == 1:
            return sums[count] - sums[start] + head, (count,)
        found = []
        for end in range(start + 1, count - left + 2):
            rest, ends = best(end, left - 1)
            found.append((max(sums[end] - sums[start], rest), (end, *ends)))
        return min(found)

    ends = best(0, stages)[1]
    return [range(start, end) for start, end in zip((0, *ends), ends, strict=False)]
