"""Goals, events and GPU samples of the complete run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.gpu.run_events import (
    Events,
    GpuSample,
    engine_left_bytes,
    idle_seconds,
    judge_value,
    memory_row,
)

GIB = 2**30


def sample(time: float, utilization: float | None = 1.0, used: int = 0, **processes: int) -> GpuSample:
    return GpuSample(time, utilization, used, {int(pid[1:]): value for pid, value in processes.items()})


@pytest.mark.parametrize(
    ("value", "at_most", "at_least", "result"),
    [
        (1.0, 3.0, None, "met"),
        (3.5, 3.0, None, "missed"),
        (0.2, None, 0.1, "met"),
        (0.0, None, 0.1, "missed"),
        (float("nan"), 3.0, None, "missed"),
        (float("nan"), None, 0.1, "missed"),
        (7.0, None, None, "stated"),
        (None, 3.0, None, "not run"),
    ],
)
def test_goal_results(value: float | None, at_most: float | None, at_least: float | None, result: str) -> None:
    assert judge_value(value, at_most, at_least) == result


def test_events_are_lines_and_the_table_is_complete_after_each(tmp_path: Path) -> None:
    events = Events(tmp_path / "out")
    events.put_goal("hand-over", 4.0, at_most=3.0, unit="s")
    events.put_goal("curve", None, at_least=0.3, note="run A failed")
    lines = [json.loads(line) for line in (tmp_path / "out" / "events.jsonl").read_text().splitlines()]
    assert [line["result"] for line in lines] == ["missed", "not run"]
    table = (tmp_path / "out" / "run.md").read_text()
    assert "| hand-over | 4 | s | <= 3 | missed | - |" in table
    assert "| curve | - |  | >= 0.3 | not run | run A failed |" in table


def test_unmeasured_goal_needs_a_reason(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="pass a note"):
        Events(tmp_path).put_goal("curve", None, at_least=0.3)


def test_idle_seconds_count_samples_below_the_bound() -> None:
    samples = [sample(index / 10, 0.0 if index % 4 == 0 else 0.9) for index in range(41)]
    assert idle_seconds(samples) == pytest.approx(4.0 * 11 / 41)
    assert idle_seconds([sample(0.0, None), sample(1.0, None)]) is None


def test_engine_memory_is_its_least_after_its_peak() -> None:
    samples = [
        sample(0, p1=1 * GIB, p2=9 * GIB),
        sample(1, p1=70 * GIB, p2=9 * GIB),
        sample(2, p1=3 * GIB, p2=30 * GIB),
        sample(3, p1=70 * GIB, p2=9 * GIB),
    ]
    assert engine_left_bytes(samples) == 3 * GIB
    assert engine_left_bytes([sample(0)]) is None
    assert memory_row([sample(0, used=2 * GIB), sample(1, used=4 * GIB)])["most MiB"] == 4096
