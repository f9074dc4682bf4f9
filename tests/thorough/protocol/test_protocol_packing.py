"""Packing: every sample exactly once, bounded rows, and ranks with equal row counts and similar work."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rlrun.protocol.packing.bin_packing import fewest_rows, first_fit_decreasing, pack_rows
from rlrun.protocol.packing.micro_batches import (
    Load,
    Plan,
    balance_sets,
    divide_samples,
    lower_bound,
    plan_micro_batches,
    sequence_work,
)

lengths_of = st.lists(st.integers(1, 64), min_size=1, max_size=60)
quadratics = st.sampled_from([0.0, 0.0001, 0.01, 0.1])


def tokens(rank: Sequence[Sequence[int]], lengths: Sequence[int]) -> list[int]:
    return [sum(lengths[s] for s in row) for row in rank]


def works(dealt: Plan, lengths: Sequence[int], quadratic: float) -> list[int]:
    return [sum(sequence_work(lengths[s], quadratic) for row in rank for s in row) for rank in dealt.ranks]


def test_packing_of_four_lengths_matches_check_value() -> None:
    lengths = [100, 90, 80, 70]
    dealt = plan_micro_batches(lengths, row_tokens=100, ranks=2)
    assert [sum(tokens(rank, lengths)) for rank in dealt.ranks] == [170, 170]


def test_packing_of_mixed_lengths_matches_check_value() -> None:
    lengths = [32, 32, 16, 16, 16, 16]
    dealt = plan_micro_batches(lengths, row_tokens=32, ranks=2)
    rows = [sorted(sorted(lengths[s] for s in row) for row in rank) for rank in dealt.ranks]
    assert rows == [[[16, 16], [32]], [[16, 16], [32]]]


def test_packing_balances_attention_work() -> None:
    lengths = [64, *[8] * 16, 32, 32, 8]
    by_tokens = works(plan_micro_batches(lengths, row_tokens=256, ranks=2), lengths, 0.1)
    by_work = works(plan_micro_batches(lengths, row_tokens=256, ranks=2, quadratic=0.1), lengths, 0.1)
    assert max(by_tokens) > 1.2 * min(by_tokens)
    assert max(by_work) < 1.03 * min(by_work)


@example(
    [63, 61, 3, 3, 1, 61, 2, 1, 2, 49, 1, 2, 1], 64, 3, 0.1
)  # balanced work alone would leave a rank with fewer samples than rows
@settings(deadline=None)
@given(lengths_of, st.integers(64, 200), st.integers(1, 9), quadratics)
def test_packing_keeps_its_invariants(lengths: list[int], row: int, ranks: int, quadratic: float) -> None:
    dealt = plan_micro_batches(lengths, row_tokens=row, ranks=ranks, quadratic=quadratic)
    assert len(dealt.ranks) == ranks
    assert sorted(s for rank in dealt.ranks for micro in rank for s in micro) == list(range(len(lengths)))
    assert all(count <= row for rank in dealt.ranks for count in tokens(rank, lengths))
    (each,) = {len(rank) for rank in dealt.ranks}
    assert each <= -(-len(first_fit_decreasing(range(len(lengths)), lengths, row)) // ranks)
    empty = sum(not micro for rank in dealt.ranks for micro in rank)
    assert empty == max(0, each * ranks - len(lengths))
    for rank in dealt.ranks:
        heavy = [sum(sequence_work(lengths[s], quadratic) for s in micro) for micro in rank]
        assert heavy == sorted(heavy, reverse=True)


@settings(deadline=None)
@given(lengths_of, st.integers(64, 200), st.integers(1, 9))
def test_packing_is_deterministic(lengths: list[int], row: int, ranks: int) -> None:
    assert plan_micro_batches(lengths, row_tokens=row, ranks=ranks) == plan_micro_batches(
        list(lengths), row_tokens=row, ranks=ranks
    )


def many_lengths(seed: int) -> tuple[list[int], int]:
    """Draw 40 or more lengths of several distributions and the tokens of a row."""
    rng = random.Random(seed)
    row, count = rng.choice([64, 100, 1000, 8192]), rng.randint(40, 200)
    shapes = [
        lambda: rng.randint(1, row),
        lambda: min(row, max(1, int(rng.lognormvariate(3, 1.2)))),
        lambda: rng.choice([row, row // 2, row // 4, row // 3 + 1, rng.randint(1, row)]),
        lambda: rng.choice([rng.randint(row // 2 + 1, row), rng.randint(1, row // 10)]),
    ]
    shape = rng.choice(shapes)
    return [shape() for _ in range(count)], row


EVEN_SAMPLES, EVEN_FILL = 16, 0.95
"""Samples per rank and fill of rows for which a plan is within 5 % of the bound."""


@settings(max_examples=150, deadline=None)
@example(67116, 3, 0.01)  # one rank has rows full of short samples, and two others a long sample each
@example(4221794419, 4, 0.01)
@example(3968363231, 9, 0.1)  # ten samples of a row's length on nine ranks, with rows that are 98 % full
@given(st.integers(0, 2**32), st.integers(2, 9), quadratics)
def test_packing_of_many_samples_is_near_the_bound(seed: int, ranks: int, quadratic: float) -> None:
    lengths, row = many_lengths(seed)
    dealt = plan_micro_batches(lengths, row_tokens=row, ranks=ranks, quadratic=quadratic)
    own = tuple(sequence_work(length, quadratic) for length in lengths)
    load = Load(tuple(lengths), own, ranks=ranks, rows=len(dealt.ranks[0]), row_tokens=row)
    fill = sum(lengths) / (ranks * load.rows * row)
    even = len(lengths) >= EVEN_SAMPLES * ranks and fill <= EVEN_FILL
    assert max(works(dealt, lengths, quadratic)) <= (1.05 if even else 1.25) * lower_bound(load)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=6), st.integers(30, 45), st.integers(2, 3), quadratics)
def test_lower_bound_holds_for_every_division(lengths: list[int], row: int, ranks: int, quadratic: float) -> None:
    """Check every division of the samples that fits, including divisions that no plan creates."""
    rows = len(plan_micro_batches(lengths, row_tokens=row, ranks=ranks, quadratic=quadratic).ranks[0])
    own = tuple(sequence_work(length, quadratic) for length in lengths)
    load = Load(tuple(lengths), own, ranks=ranks, rows=rows, row_tokens=row)
    for owners in itertools.product(range(ranks), repeat=len(lengths)):
        tokens_of, work_of = [0] * ranks, [0] * ranks
        for owner, length, units in zip(owners, lengths, own, strict=True):
            tokens_of[owner] += length
            work_of[owner] += units
        if max(tokens_of) <= rows * row:
            assert max(work_of) >= lower_bound(load)


def test_lower_bound_considers_ranks_with_full_rows() -> None:
    """The two longest samples occupy at most two ranks. The third rank has at most 10 short samples, and the two share
    the rest.
    """
    lengths = (60, 60, *[10] * 16)
    load = Load(lengths, tuple(sequence_work(length, 0.1) for length in lengths), ranks=3, rows=1, row_tokens=100)
    short, long = sequence_work(10, 0.1), sequence_work(60, 0.1)
    assert lower_bound(load) == long + 3 * short > sum(load.works) / 3


def brute_force(lengths: Sequence[int], row: int, ranks: int, quadratic: float) -> tuple[int, int]:
    """Return the fewest rows per rank and the least maximal work over all divisions of the samples."""

    def rows_needed(samples: Sequence[int]) -> int:
        """Return the fewest rows over all partitions, by adding the samples one by one."""
        states: set[tuple[int, ...]] = {()}
        for sample in samples:
            need = lengths[sample]
            opened = {tuple(sorted((*state, need))) for state in states}
            filled = {
                tuple(sorted((*state[:i], room + need, *state[i + 1 :])))
                for state in states
                for i, room in enumerate(state)
                if room + need <= row
            }
            states = opened | filled
        return min(len(state) for state in states)

    def deals() -> Iterator[list[list[int]]]:
        for owners in itertools.product(range(ranks), repeat=len(lengths)):
            yield [[s for s, owner in enumerate(owners) if owner == rank] for rank in range(ranks)]

    found: dict[int, int] = {}
    for dealt in deals():
        each = max(rows_needed(own) for own in dealt)
        counts = [len(own) for own in dealt]
        for rows in range(each, len(lengths) + 1):
            full = min(counts) >= rows if len(lengths) >= rows * ranks else max(counts) <= rows
            if full:
                most = max(sum(sequence_work(lengths[s], quadratic) for s in own) for own in dealt)
                found[rows] = min(most, found.get(rows, most))
    return min(found), found[min(found)]


@settings(max_examples=60, deadline=None)
@example([3, 28, 18, 15, 11, 17], 30, 2, 0.01)  # pairwise exchanges end above the optimum
@given(st.lists(st.integers(1, 30), min_size=1, max_size=6), st.integers(30, 45), st.integers(1, 3), quadratics)
def test_packing_of_few_samples_is_optimal(lengths: list[int], row: int, ranks: int, quadratic: float) -> None:
    dealt = plan_micro_batches(lengths, row_tokens=row, ranks=ranks, quadratic=quadratic)
    rows, most = brute_force(lengths, row, ranks, quadratic)
    assert len(dealt.ranks[0]) == rows
    assert max(works(dealt, lengths, quadratic)) == most
    own = tuple(sequence_work(length, quadratic) for length in lengths)
    assert lower_bound(Load(tuple(lengths), own, ranks=ranks, rows=rows, row_tokens=row)) <= most


def least_most(load: Load, enough: int) -> int:
    """Return the least maximal work over all divisions that fit, or `enough` if none is better."""
    count = len(load.works)
    codes = np.arange(
        load.ranks ** (count - 1)
    )  # ranks are interchangeable, so the first sample belongs to the first rank
    owners = np.stack([np.zeros_like(codes), *(codes // load.ranks**i % load.ranks for i in range(count - 1))])
    most = np.max([np.array(load.works) @ (owners == rank) for rank in range(load.ranks)], axis=0)
    for code in np.argsort(most, kind="stable"):
        if most[code] >= enough:
            break
        dealt = [np.flatnonzero(owners[:, code] == rank).tolist() for rank in range(load.ranks)]
        if all(load.rows_for(own) is not None for own in dealt):
            return int(most[code])
    return enough


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("ranks", "count", "above"), [(2, 13, 0.001), (2, 15, 0.001), (2, 17, 0.001), (3, 12, 0.003)])
def test_packing_of_medium_batches_is_nearly_optimal(ranks: int, count: int, above: float, seed: int) -> None:
    rng = random.Random(f"{ranks}/{count}/{seed}")
    lengths = tuple(min(8192, max(16, int(rng.lognormvariate(6.8, 1.0)))) for _ in range(count))
    dealt = plan_micro_batches(lengths, row_tokens=8192, ranks=ranks, quadratic=1e-4)
    own = tuple(sequence_work(length, 1e-4) for length in lengths)
    load = Load(lengths, own, ranks=ranks, rows=len(dealt.ranks[0]), row_tokens=8192)
    most = max(works(dealt, lengths, 1e-4))
    assert most <= (1 + above) * least_most(load, most)


@settings(deadline=None)
@given(st.lists(st.integers(0, 40), max_size=5), st.lists(st.integers(0, 40), max_size=5))
def test_divisions_of_a_pair_are_ordered_by_gap(mine: list[int], theirs: list[int]) -> None:
    costs = [*mine, *theirs]
    samples = range(len(costs))
    found = list(divide_samples(samples[: len(mine)], samples[len(mine) :], costs))
    assert len({tuple(sorted(first)) for first, _ in found}) == len(found) == 2 ** len(costs)
    assert all(sorted([*first, *second]) == list(samples) for first, second in found)
    gaps = [abs(sum(costs[s] for s in first) - sum(costs[s] for s in second)) for first, second in found]
    assert gaps == sorted(gaps)


def test_lower_bound_considers_tokens_without_room() -> None:
    lengths = (90, *[25] * 4)
    load = Load(lengths, tuple(sequence_work(length, 0.1) for length in lengths), ranks=2, rows=1, row_tokens=95)
    alone = sequence_work(90, 0.1)
    assert lower_bound(load) == alone + 5 * sequence_work(25, 0.1) // 25  # 190 tokens, and the other rank can hold 95


def test_row_search_beats_first_fit_decreasing() -> None:
    lengths, row = [4, 4, 5, 5, 6, 6], 15
    assert len(first_fit_decreasing(range(6), lengths, row)) == 3
    assert fewest_rows(lengths, row) == 2
    rows = pack_rows(range(6), lengths, row, 2)
    assert rows is not None
    assert tokens(rows, lengths) == [15, 15]


@settings(deadline=None)
@given(lengths_of)
def test_first_fit_leaves_no_two_mergeable_rows(lengths: list[int]) -> None:
    rows = sorted(tokens(first_fit_decreasing(range(len(lengths)), lengths, 64), lengths))
    assert len(rows) < 2 or rows[0] + rows[1] > 64


@pytest.mark.parametrize(("lengths", "bad"), [([10, 33], "lengths[1] is 33"), ([0], "lengths[0] is 0")])
def test_sample_longer_than_a_row_is_refused(lengths: list[int], bad: str) -> None:
    with pytest.raises(ValueError) as error:
        plan_micro_batches(lengths, row_tokens=32, ranks=1)
    assert f"{bad}; a row holds 1 to 32 tokens" in str(error.value)


def test_ranks_without_samples_get_empty_rows() -> None:
    dealt = plan_micro_batches([5, 7], row_tokens=10, ranks=4)
    assert sorted(dealt.ranks) == [((),), ((),), ((0,),), ((1,),)]


def test_empty_batch_gives_one_empty_row_per_rank() -> None:
    assert plan_micro_batches([], row_tokens=10, ranks=2).ranks == (((),), ((),))


def test_balance_gives_equal_counts() -> None:
    assert [len(items) for items in balance_sets([9, 1, 1, 1, 1, 1], 3)] == [2, 2, 2]
