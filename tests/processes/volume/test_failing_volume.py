"""Durable writes on a file system with scripted failures of each operation: no data is lost, and no restart counts."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.volume_faults import RESULTS, WRITERS, play, rows
from tests.support.failing_volume.play import NOT_TRIED, Result, counted


def check_results(results: list[Result]) -> None:
    assert results
    assert [entry for result in results for entry in result.lost] == []
    assert counted(results) == []
    assert {result.killed for result in results} <= {"old", "new", NOT_TRIED}
    assert {result.killed for result in results} & {"old", "new"}


@pytest.mark.parametrize(("writer", "every"), [("journal", 2), ("attempt", 2)])
def test_writes_lose_nothing_and_continue_after_faults(tmp_path: Path, writer: str, every: int) -> None:
    results = play(writer, tmp_path, counts=(4,), every=every)
    check_results(results)
    assert all(result.went_on == result.faults == 6 for result in results), [r.ended for r in results]


@pytest.mark.full
@pytest.mark.parametrize("writer", WRITERS)
def test_writes_lose_nothing_at_any_operation(tmp_path: Path, writer: str) -> None:
    results = play(writer, tmp_path)
    check_results(results)
    if writer == "real-checkpoint":
        assert [result.ended for result in results if result.ended] == [], "a checkpoint never ends the trainer"
    text = RESULTS.read_text()
    assert [row for row in rows(results) if row not in text] == [], "python -m benchmarks.volume_faults --write"
