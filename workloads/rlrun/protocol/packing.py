"""Packing: which samples go into which micro-batch of which rank. Pure; every rank computes the same plan from the same lengths.

Samples are packed first-fit-decreasing into rows of at most `row_tokens`. The rows are dealt to the ranks so that each gets the same
number (all ranks must take part in every collective) and nearly the same work `sum(n + quadratic * n^2)`, by the balanced variant of
the largest differencing method (Karmarkar & Karp 1982; Michiels et al. 2003).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

Row = tuple[int, ...]
"""Indices of the samples that share one micro-batch; empty for one without work."""


@dataclass(frozen=True)
class Plan:
    """`ranks[r][m]` is micro-batch `m` of rank `r`; all ranks have the same number of them."""

    ranks: tuple[tuple[Row, ...], ...]


def first_fit_decreasing(lengths: Sequence[int], row_tokens: int) -> list[Row]:
    """Pack samples into rows of at most `row_tokens` tokens.

    Raises:
        ValueError: a sample is longer than a row, or empty.
    """
    rows: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        need = lengths[index]
        if not 0 < need <= row_tokens:
            raise ValueError(f"lengths[{index}] is {need}; a row holds 1 to {row_tokens} tokens")
        for row, left in enumerate(room):
            if need <= left:
                rows[row].append(index)
                room[row] -= need
                break
        else:
            rows.append([index])
            room.append(row_tokens - need)
    return [tuple(row) for row in rows]


def _split_to_multiple(rows: list[Row], ranks: int, lengths: Sequence[int]) -> list[Row]:
    """Split rows until their number is a multiple of `ranks`; only when no row can be split, add empty ones."""
    rows = list(rows)
    while not rows or len(rows) % ranks:
        heaviest = max(
            (i for i, row in enumerate(rows) if len(row) > 1),
            key=lambda i: sum(lengths[s] for s in rows[i]),
            default=None,
        )
        if heaviest is None:
            rows.append(())
            continue
        halves: tuple[list[int], list[int]] = ([], [])
        weight = [0, 0]
        for sample in sorted(rows[heaviest], key=lambda s: (-lengths[s], s)):
            half = 0 if weight[0] <= weight[1] else 1
            halves[half].append(sample)
            weight[half] += lengths[sample]
        rows[heaviest] = tuple(halves[0])
        rows.append(tuple(halves[1]))
    return rows


def balance(costs: Sequence[float], ranks: int) -> list[list[int]]:
    """Partition items into `ranks` sets of equal size with nearly equal sums.

    Args:
        costs: one per item; their number is a multiple of `ranks`.
        ranks: number of sets.
    """
    order = sorted(range(len(costs)), key=lambda i: (-costs[i], i))
    ties = count()
    heap: list[tuple[float, int, list[tuple[float, list[int]]]]] = []
    for start in range(0, len(order), ranks):
        sets = [(costs[i], [i]) for i in order[start : start + ranks]]
        heapq.heappush(heap, (sets[-1][0] - sets[0][0], next(ties), sets))
    while len(heap) > 1:
        _, _, first = heapq.heappop(heap)
        _, _, second = heapq.heappop(heap)
        merged = [
            (a_cost + b_cost, a + b)
            for (a_cost, a), (b_cost, b) in zip(
                sorted(first, key=lambda s: -s[0]), sorted(second, key=lambda s: s[0]), strict=True
            )
        ]
        merged.sort(key=lambda s: -s[0])
        heapq.heappush(heap, (merged[-1][0] - merged[0][0], next(ties), merged))
    return [sorted(items) for _, items in heap[0][2]] if heap else [[] for _ in range(ranks)]


def plan(lengths: Sequence[int], *, row_tokens: int, ranks: int, quadratic: float = 0.0) -> Plan:
    """Deal all samples to all ranks.

    Args:
        lengths: tokens of each sample, `[N]`.
        row_tokens: most tokens of one micro-batch.
        ranks: data-parallel world size.
        quadratic: work of one pair of tokens (attention) relative to that of one token.
    """
    rows = _split_to_multiple(first_fit_decreasing(lengths, row_tokens), ranks, lengths)
    costs = [sum(lengths[s] + quadratic * lengths[s] ** 2 for s in row) for row in rows]
    return Plan(tuple(tuple(rows[i] for i in chosen) for chosen in balance(costs, ranks)))
