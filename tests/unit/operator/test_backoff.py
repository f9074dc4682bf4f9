"""Exponential backoff: doubling, bound and jitter."""

from __future__ import annotations

import pytest

from rlrun.backoff import backoff, jittered


def test_backoff_doubles_up_to_its_limit() -> None:
    waits = [backoff(failures, first=5.0, longest=60.0) for failures in (0, 1, 2, 3, 4, 5, 6)]
    assert waits == [5.0, 5.0, 10.0, 20.0, 40.0, 60.0, 60.0]


@pytest.mark.parametrize("failures", [1025, 10**6])
def test_backoff_accepts_any_number_of_failures(failures: int) -> None:
    assert backoff(failures, first=0.5, longest=30.0) == 30.0


def test_jitter_spreads_to_both_sides() -> None:
    assert [jittered(10.0, 0.2, random) for random in (0.0, 0.5)] == [8.0, 10.0]
    assert jittered(10.0, 0.2, 0.999) == pytest.approx(12.0, abs=0.01)
