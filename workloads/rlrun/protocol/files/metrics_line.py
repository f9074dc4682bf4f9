"""A line of a run's `metrics.jsonl`, which the orchestrator writes and everything that shows a run reads."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

FURTHEST = "furthest_step"
"""In the line of a step that was trained before, and lost by a restart: the highest step that was."""
MetricsLine = dict[str, float]
"""A step's metrics by name, with `step`, `attempt` and `time`."""


def read_metrics(path: Path) -> tuple[list[MetricsLine], list[bytes]]:
    """Read a run's `metrics.jsonl`: the lines of steps, and damaged lines as they are.

    The end of a line that a killed writer left is in neither. A run continues without damaged lines: metrics are for people.
    """
    content = path.read_bytes() if path.is_file() else b""
    found: list[MetricsLine] = []
    damaged: list[bytes] = []
    for line in content.rpartition(b"\n")[0].split(b"\n"):
        document = _parse(line)
        if document is not None:
            found.append(document)
        elif line.strip():
            damaged.append(line)
    return found, damaged


def _parse(line: bytes) -> MetricsLine | None:
    try:
        document = json.loads(line)
    except ValueError:
        return None
    is_step = isinstance(document, dict) and isinstance(document.get("step"), int)
    return document if is_step and all(isinstance(value, int | float) for value in document.values()) else None


def missing_answers(line: Mapping[str, float], prefix: str) -> str:
    """Note that belongs to a held-out mean of which answers are missing, such as ` (partial: 4 of 6 answers in time, ...)`; else empty.

    Args:
        line: metrics.
        prefix: of the evaluation's names, such as `eval/gsm8k/`.
    """
    done, late, failed = (line.get(prefix + name) or 0 for name in ("answers", "timeouts", "errors"))
    if not late and not failed:
        return ""
    of_all = line.get(prefix + "reward/mean_all")
    known = [f"{failed:.0f} failed"] * bool(failed) + [f"{of_all:.3f} with the rest as 0"] * (of_all is not None)
    return f" (partial: {', '.join([f'{done:.0f} of {done + late + failed:.0f} answers in time', *known])})"
