"""Estimate of pass@k from the samples of a task."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlrun.orchestrator.evaluation.evaluator import mean_pass_at_k, pass_at_k


@given(st.lists(st.booleans(), min_size=1, max_size=8), st.data())
def test_pass_at_k_equals_mean_over_all_choices(right: list[bool], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(right)))
    chosen = [any(choice) for choice in combinations(right, k)]
    assert pass_at_k(len(right), sum(right), k) == pytest.approx(sum(chosen) / len(chosen))


def test_pass_at_k_is_exact_for_many_samples() -> None:
    assert pass_at_k(1000, 1, 500) == pytest.approx(0.5)
    assert pass_at_k(10, 3, 5) == pytest.approx(1 - 21 / 252)


@pytest.mark.parametrize(
    ("samples", "solved", "k", "message"),
    [(4, 2, 5, "k is 5"), (4, 2, 0, "k is 0"), (4, 5, 1, "solved is 5"), (4, -1, 1, "solved is -1")],
)
def test_counts_that_contradict_each_other_are_named(samples: int, solved: int, k: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pass_at_k(samples, solved, k)


def test_pass_at_k_covers_powers_of_two() -> None:
    rewards = [[1.0, 0.0, 0.5, 1.0, 0.0], [0.0, 0.99, 0.0, 1.5]]
    expected = {1: (2 / 5 + 1 / 4) / 2, 2: (1 - 3 / 10 + 1 / 2) / 2, 4: 1.0}
    assert mean_pass_at_k(rewards, solved_reward=1.0) == pytest.approx(expected)
    assert mean_pass_at_k(rewards, solved_reward=0.99)[1] == pytest.approx((2 / 5 + 2 / 4) / 2)
    assert mean_pass_at_k([], solved_reward=1.0) == {}
