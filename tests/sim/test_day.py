"""Two simulated hours with one fault per minute: bounded memory, queue and writes."""

from __future__ import annotations

from tests.sim.day import live_through

WRITES_OF_A_FAULT = 60
"""Write requests per fault: a fault costs at most one attempt, about twenty requests and as many events and statuses."""


def test_memory_queue_and_writes_stay_bounded() -> None:
    day = live_through(2)
    first, last = day.hours
    assert last.kilobytes < first.kilobytes * 1.5 + 300
    assert max(hour.longest_queue for hour in day.hours) <= 1, "one run is in the queue at most once"
    assert all(hour.writes <= 60 * WRITES_OF_A_FAULT for hour in day.hours)
    assert last.attempts > first.attempts > 2, "faults ended attempts, and the run went on"
