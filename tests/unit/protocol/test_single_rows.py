"""Rows of one sequence: every sample once, equal row counts on all ranks, and similar work."""

from __future__ import annotations

import pytest

from rlrun.protocol.packing.micro_batches import plan_micro_batches, sequence_work


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_rows_of_one_sample_hold_every_sample_once(ranks: int) -> None:
    lengths = [9, 4, 13, 6, 3, 13, 1]
    planned = plan_micro_batches(lengths, row_tokens=64, ranks=ranks, samples_per_row=1).ranks
    assert {len(own) for own in planned} == {-(-len(lengths) // ranks)}
    assert sorted(sample for own in planned for row in own for sample in row) == list(range(len(lengths)))
    assert max(len(row) for own in planned for row in own) == 1


def test_rows_of_one_sample_are_level_and_longest_first() -> None:
    lengths = [100, 90, 80, 70, 60, 50, 40, 30]
    planned = plan_micro_batches(lengths, row_tokens=128, ranks=2, quadratic=0.01, samples_per_row=1).ranks
    done = [sum(sequence_work(lengths[row[0]], 0.01) for row in own) for own in planned]
    assert max(done) <= 1.05 * min(done)
    for own in planned:
        assert [lengths[row[0]] for row in own] == sorted((lengths[row[0]] for row in own), reverse=True)


def test_sample_longer_than_a_row_is_refused_in_rows_of_one_sample() -> None:
    with pytest.raises(ValueError, match=r"lengths\[1\] is 9; a row holds 1 to 8 tokens"):
        plan_micro_batches([4, 9], row_tokens=8, ranks=1, samples_per_row=1)
