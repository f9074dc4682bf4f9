"""Phases of ranks: reported to rank 0 without waiting, even if a rank is gone."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from datetime import timedelta

import pytest
from torch.distributed import TCPStore

from rlrun.trainer.ranks.phases import Phases


def open_store() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=30), wait_for_workers=False)


def eventually(condition: Callable[[], bool]) -> bool:
    """Whether the condition becomes true: a store applies writes later, and its client does not wait."""
    deadline = time.monotonic() + 60
    while not (true := condition()) and time.monotonic() < deadline:
        time.sleep(0.001)
    return true


def test_rank_0_reads_last_phase_of_other_ranks() -> None:
    store = open_store()
    first, second, third = (Phases(rank, 3, ("127.0.0.1", store.port)) for rank in range(3))
    second.report_phase("training", 12, 3)
    assert first.other_states() == [], "the third has not spoken yet"
    third.report_phase("loading", 0)
    third.report_phase("saving", 11)
    del third  # the phase of a rank that has ended or hangs remains in the store
    words = [(1, "training", 12, 3), (2, "saving", 11, 0)]
    assert eventually(lambda: [(s.rank, s.phase, s.step, s.part) for s in first.other_states()] == words), (
        first.other_states()
    )


def test_phases_without_store_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    silent = Phases.of_group(1, 2)
    silent.report_phase("training", 1)
    assert silent.other_states() == []
    monkeypatch.setattr("rlrun.trainer.ranks.phases._CONNECT_SECONDS", 0.2)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # no process listens there
        nowhere = Phases(0, 2, ("127.0.0.1", taken.getsockname()[1]))
    assert nowhere.other_states() == []


def test_phases_survive_loss_of_the_store() -> None:
    store = open_store()
    first, second = (Phases(rank, 2, ("127.0.0.1", store.port)) for rank in range(2))
    del store
    for step in range(3):
        second.report_phase("training", step)
    assert first.other_states() == []
