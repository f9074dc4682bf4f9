"""New division of two ranks' samples: yields all possible divisions, the most even ones first. Pure, exact arithmetic.

The two halves of the samples are enumerated separately and combined in order (Horowitz & Sahni 1974): 2^(n/2) sums represent 2^n divisions.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heapreplace

FREE_SAMPLES = 20
"""Maximum number of samples that are divided; of more samples, those with the least work, while the others stay."""

Division = tuple[list[int], list[int]]


def divisions(mine: Sequence[int], theirs: Sequence[int], works: Sequence[int]) -> Iterator[Division]:
    """Yield divisions of all samples of two ranks, by increasing difference of work.

    Args:
        mine: samples of one rank.
        theirs: samples of the other rank.
        works: work of each sample.
    """
    order = sorted([*mine, *theirs], key=lambda s: (works[s], s))
    free, fixed = order[:FREE_SAMPLES], set(order[FREE_SAMPLES:])
    kept, left = [s for s in mine if s in fixed], [s for s in theirs if s in fixed]
    # Twice the required sum of the chosen free samples, doubled so that it is an integer.
    twice = sum(works[s] for s in free) + sum(works[s] for s in left) - sum(works[s] for s in kept)
    half = len(free) // 2
    small, large = _subsets(free[:half], works), _subsets(free[half:], works)
    sums = [total for total, _ in large]
    # Two walks per small subset, from the best partner in both directions.
    walks: list[tuple[int, int, int, int]] = []
    for index, (total, _) in enumerate(small):
        place = bisect_left(sums, -(-(twice - 2 * total) // 2))
        for at, direction in ((place, 1), (place - 1, -1)):
            if 0 <= at < len(sums):
                walks.append((abs(twice - 2 * (total + sums[at])), index, at, direction))
    heapify(walks)
    while walks:
        _, index, at, direction = walks[0]
        chosen = set(small[index][1]) | set(large[at][1])
        yield [*kept, *sorted(chosen)], [*left, *(s for s in free if s not in chosen)]
        after = at + direction
        if 0 <= after < len(sums):
            heapreplace(walks, (abs(twice - 2 * (small[index][0] + sums[after])), index, after, direction))
        else:
            heappop(walks)


def _subsets(samples: Sequence[int], works: Sequence[int]) -> list[tuple[int, tuple[int, ...]]]:
    """Return all subsets, by increasing work."""
    found: list[tuple[int, tuple[int, ...]]] = [(0, ())]
    for sample in samples:
        found += [(total + works[sample], (*chosen, sample)) for total, chosen in found]
    return sorted(found)
