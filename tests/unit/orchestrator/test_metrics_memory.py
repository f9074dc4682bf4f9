"""Memory use of the `metrics.jsonl` writer over many steps."""

from __future__ import annotations

import gc
import threading
import tracemalloc
from pathlib import Path

from rlrun.orchestrator.aio.volume_access import BestEffortWriter
from rlrun.orchestrator.progress.metrics_file import MetricsFile

STEPS = 1000
BYTES_PER_STEP = 100
"""Limit of the growth. A set for each step needs 216 bytes with its dictionary entry; other threads allocated up to 25 bytes per step."""


def test_metrics_file_memory_does_not_grow_with_steps(tmp_path: Path) -> None:
    writer = BestEffortWriter()
    file = MetricsFile(
        tmp_path / "metrics.jsonl", attempt=1, base_step=0, unwritten=[], evaluated=lambda step: False, writer=writer
    )

    def write_steps(first: int) -> int:
        """Return the traced memory after `STEPS` steps, in bytes."""
        for step in range(first, first + STEPS):
            file.add(step, "batch", {"reward/mean": 0.5})
            file.add(step, "trained", {"loss": 0.25})
        written = threading.Event()
        writer.write("nothing", written.set, keep=True)
        assert written.wait(60)
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        before = write_steps(1)
        growth = write_steps(1 + STEPS) - before
    finally:
        tracemalloc.stop()
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2 * STEPS
    assert growth / STEPS < BYTES_PER_STEP


def test_late_evaluation_of_written_step_is_written_immediately(tmp_path: Path) -> None:
    """The late evaluation must not block later lines, although the other parts of the step are no longer in memory."""
    writer = BestEffortWriter()
    file = MetricsFile(
        tmp_path / "metrics.jsonl", attempt=1, base_step=0, unwritten=[], evaluated=lambda step: False, writer=writer
    )
    file.add(1, "batch", {})
    file.add(1, "trained", {})
    file.add(1, "evaluation", {"eval/e/reward/mean": 0.5})
    assert file.pending() == []
