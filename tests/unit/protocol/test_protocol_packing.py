"""Packing: nothing lost, nothing doubled, rows within bounds, ranks equal in number and near in work."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlrun.protocol.packing import balance, first_fit_decreasing, plan

lengths_of = st.lists(st.integers(1, 64), min_size=1, max_size=60)


def tokens(rank: tuple[tuple[int, ...], ...], lengths: list[int]) -> list[int]:
    return [sum(lengths[s] for s in row) for row in rank]


def test_the_check_value_of_four_lengths() -> None:
    lengths = [100, 90, 80, 70]
    dealt = plan(lengths, row_tokens=100, ranks=2)
    assert [sum(tokens(rank, lengths)) for rank in dealt.ranks] == [170, 170]


def test_the_check_value_of_mixed_lengths() -> None:
    lengths = [32, 32, 16, 16, 16, 16]
    dealt = plan(lengths, row_tokens=32, ranks=2)
    rows = [sorted(sorted(lengths[s] for s in row) for row in rank) for rank in dealt.ranks]
    assert rows == [[[16, 16], [32]], [[16, 16], [32]]]


def test_attention_counts_when_it_is_asked_to() -> None:
    lengths = [64, 16, 16, 16, 16, 64, 32, 32]
    dealt = plan(lengths, row_tokens=64, ranks=2, quadratic=0.1)
    work = [sum(lengths[s] + 0.1 * lengths[s] ** 2 for row in rank for s in row) for rank in dealt.ranks]
    assert max(work) / min(work) < 1.35


@given(lengths_of, st.integers(64, 200), st.integers(1, 9), st.sampled_from([0.0, 0.01]))
def test_invariants(lengths: list[int], row: int, ranks: int, quadratic: float) -> None:
    dealt = plan(lengths, row_tokens=row, ranks=ranks, quadratic=quadratic)
    assert len(dealt.ranks) == ranks
    assert sorted(s for rank in dealt.ranks for micro in rank for s in micro) == list(range(len(lengths)))
    assert all(count <= row for rank in dealt.ranks for count in tokens(rank, lengths))
    assert len({len(rank) for rank in dealt.ranks}) == 1
    empty = sum(not micro for rank in dealt.ranks for micro in rank)
    assert empty == 0 or len(lengths) < len(dealt.ranks[0]) * ranks


@given(lengths_of, st.integers(64, 200), st.integers(1, 9))
def test_every_rank_computes_the_same_plan(lengths: list[int], row: int, ranks: int) -> None:
    assert plan(lengths, row_tokens=row, ranks=ranks) == plan(list(lengths), row_tokens=row, ranks=ranks)


@given(lengths_of, st.integers(2, 8))
def test_ranks_differ_by_no_more_than_the_heaviest_row(lengths: list[int], ranks: int) -> None:
    dealt = plan(lengths, row_tokens=64, ranks=ranks)
    work = [sum(tokens(rank, lengths)) for rank in dealt.ranks]
    heaviest = max(count for rank in dealt.ranks for count in tokens(rank, lengths))
    assert max(work) - min(work) <= heaviest


@given(lengths_of)
def test_no_two_rows_would_fit_into_one(lengths: list[int]) -> None:
    rows = sorted(sum(lengths[s] for s in row) for row in first_fit_decreasing(lengths, 64))
    assert len(rows) < 2 or rows[0] + rows[1] > 64


@pytest.mark.parametrize(("lengths", "bad"), [([10, 33], "lengths[1] is 33"), ([0], "lengths[0] is 0")])
def test_a_sample_that_fits_no_row(lengths: list[int], bad: str) -> None:
    with pytest.raises(ValueError) as error:
        plan(lengths, row_tokens=32, ranks=1)
    assert f"{bad}; a row holds 1 to 32 tokens" in str(error.value)


def test_more_ranks_than_samples_get_rows_without_work() -> None:
    dealt = plan([5, 7], row_tokens=10, ranks=4)
    assert sorted(dealt.ranks) == [((),), ((),), ((0,),), ((1,),)]


def test_balance_takes_equal_numbers() -> None:
    assert [len(items) for items in balance([9.0, 1, 1, 1, 1, 1], 3)] == [2, 2, 2]
