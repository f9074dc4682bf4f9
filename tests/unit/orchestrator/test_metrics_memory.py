"""Memory of the writer of `metrics.jsonl`: it does not grow with the steps."""

from __future__ import annotations

import gc
import threading
import tracemalloc
from pathlib import Path

from rlrun.orchestrator.aio.volume_access import BestEffortWriter
from rlrun.orchestrator.progress.metrics_file import MetricsFile

STEPS = 1000
BYTES_PER_STEP = 100
"""Less than half of a set for each step (216 bytes with its place in a dictionary); other threads of the process allocated up to 25."""


def test_metrics_file_keeps_nothing_of_written_steps(tmp_path: Path) -> None:
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


def test_evaluation_of_a_written_step_makes_a_line_at_once(tmp_path: Path) -> None:
    """It blocks no later line, although the step's other parts are forgotten."""
    writer = BestEffortWriter()
    file = MetricsFile(
        tmp_path / "metrics.jsonl", attempt=1, base_step=0, unwritten=[], evaluated=lambda step: False, writer=writer
    )
    file.add(1, "batch", {})
    file.add(1, "trained", {})
    file.add(1, "evaluation", {"eval/e/reward/mean": 0.5})
    assert file.pending() == []
