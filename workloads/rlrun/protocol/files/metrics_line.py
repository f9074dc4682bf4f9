"""A line of a run's `metrics.jsonl`, which the orchestrator writes and everything that shows a run reads."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from rlrun.protocol.files.durable import write_chunks

_CHUNK_BYTES = 128 * 1024
FURTHEST = "furthest_step"
"""In the line of a step that was trained before, and lost by a restart: the highest step that was."""
MetricsLine = dict[str, float]
"""A step's metrics by name, with `step`, `attempt` and `time`."""


def metrics_lines(path: Path) -> Iterator[tuple[bytes, MetricsLine | None]]:
    """Yield the lines of a run's `metrics.jsonl`, one at a time: with its newline, and parsed or None if it is damaged.

    The end of a line that a killed writer left is not among them. Memory stays that of one line: a long run has 1 GB of them.
    """
    if not path.is_file():
        return
    with path.open("rb") as file:
        for line in file:
            if line.endswith(b"\n") and line.strip():
                yield line, _parse_line(line)


def read_metrics(path: Path) -> tuple[list[MetricsLine], list[bytes]]:
    """Read a run's `metrics.jsonl` into memory: the lines of steps, and damaged lines as they are; see `metrics_lines`.

    A run continues without damaged lines: metrics are for people.
    """
    found: list[MetricsLine] = []
    damaged: list[bytes] = []
    for line, document in metrics_lines(path):
        if document is not None:
            found.append(document)
        else:
            damaged.append(line.rstrip(b"\n"))
    return found, damaged


def keep_metrics(path: Path, *, through: int, prefix: int | None = None) -> None:
    """Replace a run's `metrics.jsonl` by its undamaged lines of steps up to `through`, in one step and with the memory of one line.

    Args:
        path: the file.
        through: last step that is kept.
        prefix: bytes of these lines if they are the first of the file, which are then not parsed again; None: unknown.

    Raises:
        OSError: the volume refuses; the file is as it was.
    """
    if prefix is not None:
        write_chunks(path, _first_bytes(path, prefix))
        return
    write_chunks(path, (line for line, found in metrics_lines(path) if found is not None and found["step"] <= through))


def _first_bytes(path: Path, count: int) -> Iterator[bytes]:
    if not count:
        return
    with path.open("rb") as file:
        while chunk := file.read(min(count, _CHUNK_BYTES)):
            count -= len(chunk)
            yield chunk


def _parse_line(line: bytes) -> MetricsLine | None:
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
