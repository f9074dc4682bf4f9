"""pytest's time limit depends on progress."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

import pytest

from tests.hang_limit import LIMIT_FACTOR, HangLimit
from tests.support.waiting import PATIENCE_SECONDS


def alarms_until_end(progress: Callable[[], object], seconds: float) -> int:
    """Return the number of alarms after which the test is ended."""
    ended: list[int] = []
    alarms: list[float] = []
    limit = HangLimit(seconds, lambda number, _: ended.append(number), progress, alarms.append)
    while not ended:
        limit(14, None)
    assert alarms == [PATIENCE_SECONDS] * len(alarms)
    return len(alarms)


def test_hang_without_progress_ends_at_second_look() -> None:
    assert alarms_until_end(lambda: "3 units", 600.0) == 1


@pytest.mark.parametrize("looks", [2, 4])
def test_slow_test_with_progress_continues(looks: int) -> None:
    numbers = count()
    assert alarms_until_end(lambda: min(next(numbers), looks), 600.0) == looks + 1


def test_slow_test_ends_at_limit() -> None:
    numbers = count()
    alarms = alarms_until_end(lambda: next(numbers), 600.0)
    assert 600.0 + alarms * PATIENCE_SECONDS == LIMIT_FACTOR * 600.0
