"""Rows: packs samples into as few micro-batches of limited tokens as possible, or into a given number of nearly equal ones. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence

EXACT_SAMPLES = 12
"""Maximum number of samples for which the search for the fewest rows is exact."""
_STEPS = 20_000
"""Maximum number of steps of one exact search."""
_LOOKS_PER_SAMPLE = 8
"""Average maximum of rows examined per sample while the lightest rows are full."""


def longest_first(samples: Iterable[int], lengths: Sequence[int]) -> list[int]:
    """Return sample indices, longest first; equal samples keep their order."""
    return sorted(samples, key=lambda i: (-lengths[i], i))


class _Rooms:
    """Remaining tokens of each row, as a tree of maxima that finds the first row with enough room in O(log rows)."""

    def __init__(self, rows: int, row_tokens: int) -> None:
        self._leaves = 1 << max(0, rows - 1).bit_length()
        self._most = [row_tokens] * (2 * self._leaves)

    def first(self, need: int) -> int:
        """Return the first row with room for `need` tokens; it always exists, because there are as many rows as samples."""
        node = 1
        while node < self._leaves:
            node *= 2
            if self._most[node] < need:
                node += 1
        return node - self._leaves

    def take(self, row: int, need: int) -> None:
        node = row + self._leaves
        self._most[node] -= need
        node //= 2
        while node:
            self._most[node] = max(self._most[2 * node], self._most[2 * node + 1])
            node //= 2


def first_fit_decreasing(samples: Iterable[int], lengths: Sequence[int], row_tokens: int) -> list[list[int]]:
    """Pack samples into rows of at most `row_tokens` tokens: longest first, each into the first row with room."""
    order = longest_first(samples, lengths)
    rooms = _Rooms(len(order), row_tokens)
    rows: list[list[int]] = []
    for sample in order:
        row = rooms.first(lengths[sample])
        rooms.take(row, lengths[sample])
        if row == len(rows):
            rows.append([])
        rows[row].append(sample)
    return rows


def pack_rows(samples: Sequence[int], lengths: Sequence[int], row_tokens: int, most: int) -> list[list[int]] | None:
    """Return rows for all samples, at most `most`, or None if no packing was found. Exact for few samples."""
    if sum(lengths[s] for s in samples) > most * row_tokens:
        return None
    rows = first_fit_decreasing(samples, lengths, row_tokens)
    if len(rows) <= most:
        return rows
    return _search_rows(longest_first(samples, lengths), lengths, row_tokens, most) if _is_small(samples) else None


def _is_small(samples: Sequence[int]) -> bool:
    return len(samples) <= EXACT_SAMPLES


def _search_rows(order: Sequence[int], lengths: Sequence[int], row_tokens: int, most: int) -> list[list[int]] | None:
    """Try every row for every sample, longest first; only the first of several rows with the same room."""
    rows: list[list[int]] = [[] for _ in range(most)]
    rooms = [row_tokens] * most
    steps = 0

    def place_sample(position: int) -> bool:
        nonlocal steps
        steps += 1
        if position == len(order):
            return True
        if steps > _STEPS:
            return False
        sample, tried = order[position], set()
        for row, room in enumerate(rooms):
            if lengths[sample] > room or room in tried:
                continue
            tried.add(room)
            rows[row].append(sample)
            rooms[row] -= lengths[sample]
            if place_sample(position + 1):
                return True
            rooms[row] += lengths[sample]
            rows[row].pop()
        return False

    return [row for row in rows if row] if place_sample(0) else None


def fewest_rows(lengths: Sequence[int], row_tokens: int, *, multiple: int = 1) -> int:
    """Return a small number of rows that hold all samples, at least 1: exact for few samples, else by first-fit-decreasing.

    Only multiples of `multiple` matter: a smaller number within the same multiple is not searched for.
    """
    samples = range(len(lengths))
    found = max(1, len(first_fit_decreasing(samples, lengths, row_tokens)))
    least = max(1, -(-sum(lengths) // row_tokens), sum(2 * length > row_tokens for length in lengths))
    while -(-least // multiple) < -(-found // multiple):
        fewer = (-(-found // multiple) - 1) * multiple
        rows = pack_rows(samples, lengths, row_tokens, fewer)
        if rows is None:
            return found
        found = len(rows)
    return found


def level_rows(
    rows: Sequence[Sequence[int]], lengths: Sequence[int], works: Sequence[int], *, count: int, row_tokens: int
) -> list[list[int]]:
    """Distribute the samples of at most `count` rows to exactly `count` rows of nearly the same work, heaviest row first.

    Rows are empty only if there are fewer samples than rows.
    """
    samples = [sample for row in rows for sample in row]
    leveled = _lightest_first(samples, lengths, works, count, row_tokens)
    if leveled is None:
        leveled = halve_rows([list(row) for row in rows if row], lengths, count)
    for row in leveled:
        row.sort()
    return sorted(leveled, key=lambda row: (-sum(works[s] for s in row), row))


def _lightest_first(
    samples: Sequence[int], lengths: Sequence[int], works: Sequence[int], rows: int, row_tokens: int
) -> list[list[int]] | None:
    """Put each sample, longest first, into the row with the least work that has room; None if a sample finds no room in few steps."""
    found: list[list[int]] = [[] for _ in range(rows)]
    rooms = [row_tokens] * rows
    loads = [(0, row) for row in range(rows)]
    looks = _LOOKS_PER_SAMPLE * (len(samples) + rows)
    for sample in longest_first(samples, lengths):
        passed: list[tuple[int, int]] = []
        while loads and rooms[loads[0][1]] < lengths[sample]:
            passed.append(heapq.heappop(loads))
        looks -= 1 + len(passed)
        if not loads or looks < 0:
            return None
        load, row = loads[0]
        found[row].append(sample)
        rooms[row] -= lengths[sample]
        heapq.heapreplace(loads, (load + works[sample], row))
        for entry in passed:
            heapq.heappush(loads, entry)
    return found


def halve_rows(rows: list[list[int]], lengths: Sequence[int], count: int) -> list[list[int]]:
    """Halve the longest rows of several samples until there are `count` rows; if no row can be halved, add empty ones."""
    rows = list(rows)
    while len(rows) < count:
        longest = max(
            (i for i, row in enumerate(rows) if len(row) > 1),
            key=lambda i: sum(lengths[s] for s in rows[i]),
            default=None,
        )
        if longest is None:
            rows.append([])
            continue
        halves: tuple[list[int], list[int]] = ([], [])
        tokens = [0, 0]
        for sample in longest_first(rows[longest], lengths):
            half = 0 if tokens[0] <= tokens[1] else 1
            halves[half].append(sample)
            tokens[half] += lengths[sample]
        rows[longest] = halves[0]
        rows.append(halves[1])
    return rows
