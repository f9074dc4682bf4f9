"""Ratios of alternating measurements."""

from __future__ import annotations

import random

from benchmarks.paired import MIN_PAIRS, estimate, turns, used


def noisy(ratio: float, pairs: int, noise: float) -> list[tuple[float, float]]:
    """Return pairs with this ratio, each with its own common load and some noise."""
    draw = random.Random(3)
    loads = [draw.uniform(1, 10) for _ in range(pairs)]
    return [(load * ratio * draw.gauss(1, noise), load) for load in loads]


def test_common_load_does_not_change_ratio() -> None:
    found = estimate(noisy(1.05, 200, 0.02))
    assert found.low < 1.05 < found.high
    assert found.high - found.low < 0.01
    assert (found.verdict(1.02), found.verdict(1.08)) == ("missed", "shown")


def test_few_noisy_pairs_are_undecided() -> None:
    assert estimate(noisy(1.0, 10, 0.2)).verdict(1.02) == "undecided"
    assert estimate([(1.0, 1.0)] * (MIN_PAIRS - 1)).verdict(1.02) == "undecided"
    assert estimate([]).verdict(1.02) == "undecided"


def test_single_outlier_does_not_move_median() -> None:
    calm = noisy(1.0, 101, 0.01)
    assert abs(estimate([*calm, (1000.0, 1.0)]).median - estimate(calm).median) < 0.01


def test_estimate_is_deterministic() -> None:
    assert estimate(noisy(1.0, 50, 0.1)) == estimate(noisy(1.0, 50, 0.1))


def test_measurement_order_alternates_between_pairs() -> None:
    assert turns(3) == [True, False, False, True, True, False]


def test_cpu_time_counts_threads_with_known_start() -> None:
    assert used({1: 5.0, 2: 7.0}, {1: 6.5, 3: 0.25}) == 1.75
