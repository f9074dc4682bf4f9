"""Start times of a rank."""

from __future__ import annotations

from rlrun.trainer.ranks.start_clock import StartClock, started_at

STAT = "42 (a b) c) S 1 42 42 0 -1 4194560 1 0 0 0 0 0 0 0 20 0 1 0 12345 1000 1 18446744073709551615"


def test_process_start_time_is_parsed_for_any_name() -> None:
    assert started_at(STAT, 100) == 123.45
    assert started_at("", 100) is None
    assert started_at("42 (a) S x", 100) is None


def test_start_phases_are_reported_once_with_durations() -> None:
    now = [50.0]
    clock = StartClock(8.0, lambda: now[0])
    clock.end_phase("imports")
    now[0] += 3
    clock.end_phase("group")
    assert clock.metrics() == {"time/start_imports": 8.0, "time/start_group": 3.0}
    assert clock.metrics() == {}
