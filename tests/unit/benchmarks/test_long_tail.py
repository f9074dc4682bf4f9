"""Ideal times in the benchmark of long-tailed lengths."""

from __future__ import annotations

import pytest

from benchmarks.long_tail import LONGEST, Pace, fit, least_seconds, lengths, steps_when_full


def test_lengths_depend_on_prompt_and_match_mean() -> None:
    assert lengths([1, 2, 3], 4, 64) == lengths((1, 2, 3), 4, 64) != lengths([1, 2, 4], 4, 64)
    assert [2 * length for length in lengths([1], 4, 10)] == pytest.approx(lengths([1], 4, 20))
    many = lengths([7], 20_000, 1.0)
    assert max(many) == LONGEST
    assert 0.85 < sum(many) / len(many) < 1.0, "the cut takes a little of the mean"


def test_steps_of_full_engine_follow_its_slots() -> None:
    assert steps_when_full([5, 1, 1, 1, 1], 2) == 5
    assert steps_when_full([3, 3, 3], 2) == 6
    assert steps_when_full([4], 8) == 4


def test_fit_recovers_pace_of_engine() -> None:
    true, wanted = Pace(step=0.008, sequence=0.0005), [30, 10, 20, 40, 5]
    steps, units = steps_when_full(wanted, 2), sum(wanted)
    found = fit((100, true.seconds(100, 100)), (steps, units, true.seconds(steps, units)))
    assert (found.step, found.sequence) == pytest.approx((true.step, true.sequence))
    noisy = fit((100, 2.0), (steps, units, 0.5))
    assert (noisy.step, noisy.sequence) == (pytest.approx(0.5 / steps), 0.0), "no pace is negative"


def test_synchronous_bound_is_longest_sequence_of_each_batch() -> None:
    batches = [[1.0, 4.0], [2.0, 2.0]]
    assert least_seconds(batches, slots=2, train_seconds=1.0, max_off_policy_steps=0) == (4 + 1) + (2 + 1)
    assert least_seconds(batches, slots=1, train_seconds=1.0, max_off_policy_steps=0) == (5 + 1) + (4 + 1)
    pace = Pace(step=1.0, sequence=0.5)
    slower = least_seconds(batches, slots=2, train_seconds=1.0, max_off_policy_steps=0, pace=pace)
    assert slower == (4 + 2.5 + 1) + (2 + 2 + 1), "a step costs more for each sequence that runs"


def test_asynchronous_bound_is_work_of_full_engine() -> None:
    batches = [[1.0, 1.0], [1.0, 4.0], [1.0, 1.0], [1.0, 1.0]]
    work = least_seconds(batches, slots=2, train_seconds=0.1, max_off_policy_steps=8)
    assert work == pytest.approx(11 / 2 + 0.1)
    trainer = least_seconds(batches, slots=2, train_seconds=3.0, max_off_policy_steps=8)
    assert trainer == 1 + 4 * 3
    age = least_seconds([[1.0], [1.0], [50.0]], slots=8, train_seconds=1.0, max_off_policy_steps=1)
    assert age == (1 + 1) + 50 + 1, "the last batch is dispatched at version 1 at the earliest"
