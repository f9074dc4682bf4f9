"""Packing of samples into micro-batches, and their balance over ranks.

Pure; every rank computes the same plan from the same lengths. Work is counted in integers: sums are exact, so that neither the order of
additions nor the processor can make two ranks disagree.

`divide_samples` yields all possible divisions of two ranks' samples, the most even ones first. The two halves of the samples are enumerated
separately and combined in order (Horowitz & Sahni 1974): 2^(n/2) sums represent 2^n divisions.

`distribute_rows` assigns samples to ranks so that the largest work of a rank is minimal. The problem is NP-hard (it contains bin
packing). Two constructions, a local search and an exact search follow each other, each only if the result is still too far above a lower
bound: rows distributed in equal number by the largest differencing method (Karmarkar & Karp 1982; its balanced variant: Michiels et al.
2003), which always succeeds; samples distributed longest first to the rank with the least work (Graham 1969); exchanges between the rank
with the most work and the others; and, for few samples, new divisions of pairs of ranks and branch and bound. Therefore the result for two
ranks and up to `FREE_SAMPLES` samples is optimal to one part in `CLOSE`, and the result for more ranks cannot be improved by dividing the
samples of two ranks differently.

`plan_micro_batches` gives each rank nearly the same work `sum(n + quadratic * n^2)` and packs its samples into rows of at most
`row_tokens`. All ranks have the same number of rows, the fewest that hold all samples, because all of them take part in every collective.
The rows of a rank are level too, and heavy ones come first: row `m` costs every rank about the same, so that no rank waits long for
another one in a collective.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heapreplace
from itertools import accumulate, count, islice
from typing import Literal

from rlrun.protocol.packing.bin_packing import (
    EXACT_SAMPLES,
    fewest_rows,
    halve_rows,
    level_rows,
    longest_first,
    pack_rows,
)

FREE_SAMPLES = 20
"""Maximum number of samples that are divided; of more samples, those with the least work, while the others stay."""

Division = tuple[list[int], list[int]]


def divide_samples(mine: Sequence[int], theirs: Sequence[int], works: Sequence[int]) -> Iterator[Division]:
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
    small, large = _all_subsets(free[:half], works), _all_subsets(free[half:], works)
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


def _all_subsets(samples: Sequence[int], works: Sequence[int]) -> list[tuple[int, tuple[int, ...]]]:
    """Return all subsets, by increasing work."""
    found: list[tuple[int, tuple[int, ...]]] = [(0, ())]
    for sample in samples:
        found += [(total + works[sample], (*chosen, sample)) for total, chosen in found]
    return sorted(found)


Rows = list[list[int]]
"""Indices of the samples of each row."""

CLOSE = 1000
"""The search stops within one part in this many of the lower bound."""
_LOOKS = 32
"""Maximum number of exchanges with one rank that are tested for whether they fit into rows."""
_NODES = 20_000
"""Maximum number of nodes of the exact search."""
FEW_SAMPLES = 64
"""Maximum number of samples for which pairs of ranks are divided again."""
_DIVISIONS = 64
"""Maximum number of divisions of a pair that are tested for whether they fit into rows."""


@dataclass(frozen=True)
class Load:
    """Samples to distribute, and the ranks that get them."""

    lengths: tuple[int, ...]
    """Tokens of each sample, `[N]`."""
    works: tuple[int, ...]
    """Work of each sample, `[N]`; a longer sample has more work, and more per token."""
    ranks: int
    rows: int
    """Number of rows per rank."""
    row_tokens: int

    @property
    def fewest(self) -> int:
        """Minimum number of samples per rank, so that no row is empty without need."""
        return self.rows if len(self.works) >= self.rows * self.ranks else 0

    @property
    def most(self) -> int:
        """Maximum number of samples per rank."""
        return len(self.works) if self.fewest else self.rows

    def work_of(self, rows: Rows) -> int:
        """Return the work of some rows."""
        return sum(self.works[s] for row in rows for s in row)

    def rows_for(self, samples: Sequence[int]) -> Rows | None:
        """Return rows of these samples for one rank, or None if their number is not allowed or no packing was found."""
        enough = self.fewest <= len(samples) <= self.most
        return pack_rows(samples, self.lengths, self.row_tokens, self.rows) if enough else None


def lower_bound(load: Load) -> int:
    """Return a lower bound of the largest work of a rank, over all distributions.

    It is the maximum of three bounds: the mean; for each k, the work of a rank with k + 1 of the k·ranks + 1 longest samples, which some
    rank must have, plus the tokens that do not fit on the other ranks at the shortest sample's work per token; and `_crowded_bound`.
    """
    if not load.works:
        return 0
    order = longest_first(range(len(load.works)), load.lengths)
    works, lengths = [load.works[s] for s in order], [load.lengths[s] for s in order]
    total = list(accumulate(works, initial=0))
    tokens = list(accumulate(lengths, initial=0))
    forced = tokens[-1] - (load.ranks - 1) * load.rows * load.row_tokens
    bound = -(-total[-1] // load.ranks)
    for first in range(0, len(order), load.ranks):
        held = first // load.ranks + 1
        end = first + 1
        own = total[end] - total[end - held]
        missing = max(0, forced - (tokens[end] - tokens[end - held]))
        bound = max(bound, own + missing * works[-1] // lengths[-1])
    return max(bound, _crowded_bound(load, works, lengths))


def _crowded_bound(load: Load, works: Sequence[int], lengths: Sequence[int]) -> int:
    """Return a lower bound from the work that few ranks must do because the room of the others is full.

    For any j < ranks, at least ranks - j ranks have none of the j longest samples. However these ranks are filled, they do no more than
    the longest other samples that fill their room, the last one in part, because a longer sample has more work per token. The j remaining
    ranks share the rest of all work.

    Args:
        load: samples and ranks.
        works: work of the samples, longest first.
        lengths: lengths of the samples, longest first.
    """
    bound, everything, room = 0, sum(works), load.rows * load.row_tokens
    for longest in range(1, min(load.ranks, len(works))):
        tokens, done = (load.ranks - longest) * room, 0
        for need, own in zip(lengths[longest:], works[longest:], strict=True):
            taken = min(need, tokens)
            done += -(-own * taken // need)
            tokens -= taken
            if not tokens:
                break
        bound = max(bound, -(-(everything - done) // longest))
    return bound


def distribute_rows(load: Load) -> list[Rows]:
    """Return the rows of each rank: at most `rows`, some possibly empty even if there are enough samples to fill them."""
    # Each stage runs only while the result is too far above the bound: rows, samples, exchanges, divisions, exact search.
    found = _deal_rows(load)
    if load.ranks == 1:
        return found
    bound = lower_bound(load)
    near = bound + bound // CLOSE
    if _heaviest_work(load, found) > near and (other := _deal_samples(load)) is not None:
        found = min(found, other, key=lambda dealt: _heaviest_work(load, dealt))
    if _heaviest_work(load, found) > near:
        found = _improve_pairs(load, found, near, _best_exchange)
    if _heaviest_work(load, found) > near and len(load.works) <= FEW_SAMPLES:
        found = _improve_pairs(load, found, near, _best_division)
    if _heaviest_work(load, found) > bound and len(load.works) <= EXACT_SAMPLES:
        found = _search_exactly(load, found, bound)
    return found


def _heaviest_work(load: Load, dealt: Sequence[Rows]) -> int:
    return max(load.work_of(own) for own in dealt)


def _deal_rows(load: Load) -> list[Rows]:
    packing = pack_rows(range(len(load.works)), load.lengths, load.row_tokens, load.rows * load.ranks)
    assert packing is not None, "the number of rows is one that was found"
    rows = halve_rows(packing, load.lengths, load.rows * load.ranks)
    chosen = balance_sets([load.work_of([row]) for row in rows], load.ranks)
    return [[rows[row] for row in own] for own in chosen]


def balance_sets(works: Sequence[int], ranks: int) -> list[list[int]]:
    """Partition items into `ranks` sets of equal size with nearly equal sums.

    Args:
        works: work of each item; the number of items is a multiple of `ranks`.
        ranks: number of sets.
    """
    order = sorted(range(len(works)), key=lambda i: (-works[i], i))
    ties = count()
    heap: list[tuple[int, int, list[tuple[int, list[int]]]]] = []
    for start in range(0, len(order), ranks):
        sets = [(works[i], [i]) for i in order[start : start + ranks]]
        heapq.heappush(heap, (sets[-1][0] - sets[0][0], next(ties), sets))
    while len(heap) > 1:
        _, _, first = heapq.heappop(heap)
        _, _, second = heapq.heappop(heap)
        merged = [
            (a_work + b_work, a + b)
            for (a_work, a), (b_work, b) in zip(first, reversed(second), strict=True)  # both in order of falling work
        ]
        merged.sort(key=lambda s: -s[0])
        heapq.heappush(heap, (merged[-1][0] - merged[0][0], next(ties), merged))
    return [sorted(items) for _, items in heap[0][2]] if heap else [[] for _ in range(ranks)]


def _deal_samples(load: Load) -> list[Rows] | None:
    """Give each sample to the rank with the least work that has room, into its fullest row with room; None if a sample finds no room."""
    dealt: list[Rows] = [[[] for _ in range(load.rows)] for _ in range(load.ranks)]
    rooms = [[(load.row_tokens, row) for row in range(load.rows)] for _ in range(load.ranks)]
    counts = [0] * load.ranks
    loads = [(0, rank) for rank in range(load.ranks)]
    lacking = load.fewest * load.ranks
    order = longest_first(range(len(load.works)), load.lengths)
    for left, sample in zip(range(len(order), 0, -1), order, strict=True):
        need = load.lengths[sample]
        # Reserve the last samples for rows that would otherwise be empty.
        open_to = load.fewest if left <= lacking else load.most
        passed = []
        while loads and (counts[loads[0][1]] >= open_to or rooms[loads[0][1]][-1][0] < need):
            passed.append(heapq.heappop(loads))
        if not loads:
            return None
        done, rank = loads[0]
        lacking -= counts[rank] < load.fewest
        counts[rank] += 1
        room, row = rooms[rank].pop(bisect_left(rooms[rank], (need, -1)))
        dealt[rank][row].append(sample)
        insort(rooms[rank], (room - need, row))
        heapq.heapreplace(loads, (done + load.works[sample], rank))
        for entry in passed:
            heapq.heappush(loads, entry)
    return dealt


Change = Callable[[Load, Rows, Rows], tuple[Rows, Rows] | None]
"""Function that returns better rows for the rank with the most work and another rank, or None."""


def _improve_pairs(load: Load, dealt: Sequence[Rows], near: int, change: Change) -> list[Rows]:
    """Change the rank with the most work together with another one while that lowers the larger of both, or until all are near."""
    dealt = list(dealt)
    loads = [load.work_of(own) for own in dealt]
    while max(loads) > near:
        heavy = loads.index(max(loads))
        others = sorted((rank for rank in range(load.ranks) if rank != heavy), key=loads.__getitem__)
        for light in others:
            changed = change(load, dealt[heavy], dealt[light])
            if changed is not None:
                dealt[heavy], dealt[light] = changed
                loads[heavy], loads[light] = load.work_of(dealt[heavy]), load.work_of(dealt[light])
                break
        else:
            break
    return dealt


def _best_exchange(load: Load, heavy: Rows, light: Rows) -> tuple[Rows, Rows] | None:
    """Move a sample, or exchange it for a shorter one: the variant that fits and leaves the smallest difference, or None."""
    mine, theirs = _flatten_rows(heavy), _flatten_rows(light)
    found = sorted(_find_exchanges(load, mine, theirs, load.work_of(heavy) - load.work_of(light)))
    for _, given, taken in found[:_LOOKS]:
        back = [] if taken < 0 else [taken]
        more = load.rows_for([s for s in theirs if s != taken] + [given])
        less = load.rows_for([s for s in mine if s != given] + back)
        if more is not None and less is not None:
            return less, more
    return None


def _flatten_rows(rows: Rows) -> list[int]:
    return [s for row in rows for s in row]


def _find_exchanges(load: Load, heavy: Sequence[int], light: Sequence[int], gap: int) -> Iterator[tuple[int, int, int]]:
    """Yield exchanges near half the gap: remaining difference, given sample, and taken sample (-1 for none)."""
    works = load.works
    taken = [-1, *sorted(light, key=lambda s: (works[s], s))]
    costs = [0, *(works[s] for s in taken[1:])]
    for given in heavy:
        # The moved work must be strictly between 0 and the gap, best in the middle.
        place = bisect_right(costs, works[given] - gap // 2)
        for other in range(max(0, place - 2), min(len(costs), place + 2)):
            moved = works[given] - costs[other]
            if 0 < moved < gap:
                yield abs(gap - 2 * moved), given, taken[other]


def _best_division(load: Load, heavy: Rows, light: Rows) -> tuple[Rows, Rows] | None:
    """Divide the samples of both again: the most even division that fits, if both parts have less work than `heavy`, or None."""
    most = load.work_of(heavy)
    for samples in islice(divide_samples(_flatten_rows(heavy), _flatten_rows(light), load.works), _DIVISIONS):
        if max(sum(load.works[s] for s in part) for part in samples) >= most:
            return None
        first, second = map(load.rows_for, samples)
        if first is not None and second is not None:
            return first, second
    return None


def _search_exactly(load: Load, dealt: list[Rows], bound: int) -> list[Rows]:
    """Try every rank for every sample, longest first; only the first of several ranks with samples of the same lengths."""
    order = longest_first(range(len(load.works)), load.lengths)
    best, best_most = dealt, _heaviest_work(load, dealt)
    own: list[list[int]] = [[] for _ in range(load.ranks)]
    loads = [0] * load.ranks
    nodes = 0

    def place_sample(position: int) -> None:
        nonlocal best, best_most, nodes
        nodes += 1
        if nodes > _NODES or best_most <= bound:
            return
        if position == len(order):
            found = [rows for samples in own if (rows := load.rows_for(samples)) is not None]
            if len(found) == load.ranks:
                best, best_most = found, max(loads)
            return
        sample, tried = order[position], set()
        for rank in sorted(range(load.ranks), key=lambda r: (loads[r], r)):
            alike = tuple(load.lengths[s] for s in own[rank])
            if loads[rank] + load.works[sample] >= best_most or alike in tried:
                continue
            tried.add(alike)
            own[rank].append(sample)
            loads[rank] += load.works[sample]
            place_sample(position + 1)
            loads[rank] -= load.works[sample]
            own[rank].pop()

    place_sample(0)
    return best


Row = tuple[int, ...]
"""Indices of the samples that share one micro-batch; empty for a micro-batch without work."""

WORK_UNITS = 1024
"""Units of work per token."""


@dataclass(frozen=True)
class Plan:
    """Assignment of samples: `ranks[r][m]` is micro-batch `m` of rank `r`; all ranks have the same number of them."""

    ranks: tuple[tuple[Row, ...], ...]


def sequence_work(length: int, quadratic: float) -> int:
    """Return the work of a sequence in units of 1/1024 of a token's work: `length + quadratic * length^2`."""
    return WORK_UNITS * length + round(WORK_UNITS * quadratic * length * length)


def plan_micro_batches(
    lengths: Sequence[int],
    *,
    row_tokens: int,
    ranks: int,
    quadratic: float = 0.0,
    samples_per_row: Literal[1] | None = None,
) -> Plan:
    """Distribute all samples to all ranks.

    Args:
        lengths: tokens of each sample, `[N]`.
        row_tokens: maximum number of tokens of one micro-batch.
        ranks: data-parallel world size.
        quadratic: work of one pair of tokens (attention) relative to that of one token.
        samples_per_row: maximum number of samples of one micro-batch. Default: unlimited.

    Returns:
        The plan. A row is empty only if there are fewer samples than rows.

    Raises:
        ValueError: a sample is longer than a row, or empty.
    """
    for index, need in enumerate(lengths):
        if not 0 < need <= row_tokens:
            raise ValueError(f"lengths[{index}] is {need}; a row holds 1 to {row_tokens} tokens")
    works = [sequence_work(length, quadratic) for length in lengths]
    if samples_per_row == 1:
        return _plan_single_rows(works, ranks)
    rows = -(-fewest_rows(lengths, row_tokens, multiple=ranks) // ranks)
    load = Load(tuple(lengths), tuple(works), ranks=ranks, rows=rows, row_tokens=row_tokens)
    dealt = [
        level_rows(own, load.lengths, load.works, count=rows, row_tokens=row_tokens) for own in distribute_rows(load)
    ]
    return Plan(tuple(tuple(tuple(row) for row in own) for own in dealt))


def _plan_single_rows(works: Sequence[int], ranks: int) -> Plan:
    """Give every rank the same number of rows with one sample each, longest first; the last rows of a rank may be empty."""
    padded = [*works, *([0] * (-len(works) % ranks))]
    dealt = balance_sets(padded, ranks)
    ordered = [sorted(own, key=lambda sample: (-padded[sample], sample)) for own in dealt]
    return Plan(tuple(tuple((s,) if s < len(works) else () for s in own) for own in ordered))
