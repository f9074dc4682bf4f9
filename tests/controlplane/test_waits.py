"""Waits of this folder: a wait fails without progress, and continues on a slow cluster."""

from __future__ import annotations

from itertools import count

import pytest

from tests.controlplane import harness
from tests.controlplane.harness import WATCHED, wait_for
from tests.support.waiting import StalledError

PATIENCE_SECONDS = 1.0


class Part:
    """Watched part that makes progress `moves` times."""

    def __init__(self, moves: int) -> None:
        self._moves, self._read = moves, count(1)

    def progress(self) -> object:
        return min(next(self._read), self._moves)

    def account(self) -> str:
        return "last line of its log"


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "PATIENCE_SECONDS", PATIENCE_SECONDS)
    monkeypatch.setattr(harness, "SIGNS_SECONDS", PATIENCE_SECONDS / 4)


def test_wait_without_progress_fails_with_state() -> None:
    part = Part(moves=2)
    WATCHED.add(part)
    with pytest.raises(StalledError) as error:
        wait_for(lambda: {"phase": "Starting"}, lambda seen: seen["phase"] == "Running", "the run trains")
    for words in ("the run trains: no progress for", '"phase": "Starting"', part.account()):
        assert words in str(error.value)


def test_wait_continues_while_a_watched_part_makes_progress() -> None:
    part, looks = Part(moves=10**6), count()
    WATCHED.add(part)
    longer = int(3 * PATIENCE_SECONDS / 0.1)
    assert wait_for(lambda: min(next(looks), longer) // longer, bool, "a slow state") == 1


def test_wait_continues_while_the_state_changes() -> None:
    looks = count()
    longer = int(3 * PATIENCE_SECONDS / 0.1)
    assert wait_for(lambda: next(looks), lambda seen: seen >= longer, "many states") >= longer
