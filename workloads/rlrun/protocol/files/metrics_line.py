"""Lines of a run's `metrics.jsonl`, and a reader of growing JSONL files.

The orchestrator writes `metrics.jsonl`, and all views of a run read it. The reader of growing files returns each complete line once.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from rlrun.protocol.files.durable import write_chunks


class Lines:
    """Complete lines of a JSONL file that grows or is replaced. Lines that are not JSON are skipped."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset, self._last = 0, b""
        """Position at which the next read starts, and the line that ends there: a different line means another file."""

    @property
    def offset(self) -> int:
        """Number of bytes read so far."""
        return self._offset

    def new(self, most: int | None = None) -> tuple[bool, list[dict[str, object]]]:
        """Return whether the read started at the beginning of the file, and the complete lines since the previous call.

        Args:
            most: maximum bytes to read, or one line if that is longer; call again until nothing comes. None: all.
        """
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset - len(self._last))
                begins = self._offset == 0 or file.read(len(self._last)) != self._last
                if begins:
                    self._offset, self._last = 0, b""
                file.seek(self._offset)
                content = file.read(-1 if most is None else most)
                while most is not None and b"\n" not in content and (more := file.read(most)):
                    content += more
        except FileNotFoundError:
            return False, []
        whole, newline, _ = content.rpartition(b"\n")
        lines = whole.splitlines(keepends=True)
        if newline:
            self._offset += len(whole) + 1
            self._last = lines[-1] + newline if lines else newline
        found = []
        for line in lines:
            with suppress(ValueError):
                document = json.loads(line)
                if isinstance(document, dict):
                    found.append(document)
        return begins, found


_CHUNK_BYTES = 128 * 1024
FURTHEST = "furthest_step"
"""Key in the line of a step that was trained before and lost by a restart: the highest trained step."""
MetricsLine = dict[str, float]
"""Metrics of a step by name, with `step`, `attempt` and `time`."""


def metrics_lines(path: Path) -> Iterator[tuple[bytes, MetricsLine | None]]:
    """Yield the lines of a run's `metrics.jsonl`, one at a time: raw with its newline, and parsed, or None for a damaged line.

    An incomplete last line of a killed writer is skipped. Only one line is in memory at a time: a long run has 1 GB of them.
    """
    if not path.is_file():
        return
    with path.open("rb") as file:
        for line in file:
            if line.endswith(b"\n") and line.strip():
                yield line, _parse_line(line)


def read_metrics(path: Path) -> tuple[list[MetricsLine], list[bytes]]:
    """Read a run's `metrics.jsonl` into memory: parsed lines of steps, and raw damaged lines; see `metrics_lines`.

    A run continues without damaged lines, because it does not depend on its metrics.
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
    """Reduce a run's `metrics.jsonl` to its undamaged lines of steps up to `through`, atomically and with the memory of one line.

    Args:
        path: file to reduce.
        through: last step to keep.
        prefix: number of bytes of these lines if they are at the start of the file, which avoids a second parse; None: unknown.

    Raises:
        OSError: the volume refuses the write; the file is unchanged.
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
    """Return a note about missing answers of a held-out mean, such as ` (partial: 4 of 6 answers in time, ...)`, or an empty string.

    Args:
        line: metrics of a step.
        prefix: prefix of the evaluation's metrics, such as `eval/gsm8k/`.
    """
    done, late, failed = (line.get(prefix + name) or 0 for name in ("answers", "timeouts", "errors"))
    if not late and not failed:
        return ""
    of_all = line.get(prefix + "reward/mean_all")
    known = [f"{failed:.0f} failed"] * bool(failed) + [f"{of_all:.3f} with the rest as 0"] * (of_all is not None)
    return f" (partial: {', '.join([f'{done:.0f} of {done + late + failed:.0f} answers in time', *known])})"
