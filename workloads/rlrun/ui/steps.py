"""Metrics of all steps of a run as columns; after the first read, only new lines are read."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left, bisect_right
from pathlib import Path
from threading import Lock

from rlrun.inspect.curves import Line
from rlrun.protocol.files.metrics_line import FURTHEST, Lines
from rlrun.runtime.printable import escape_controls

_CHUNK = 4 * 1024 * 1024
METRICS_MAX = 2000
"""Maximum number of metrics per run; an environment can create new names forever."""
_NOT_METRICS = ("step", "attempt", "time")


class StepIndex:
    """Columns of `metrics.jsonl`.

    A repeated step (of a later attempt) replaces that step and all later steps.

    Args:
        path: path of the file, which may not exist yet.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = Lock()
        self.lines_read = 0
        """Number of parsed lines."""
        self._reset_columns()
        self._lines = Lines(path)

    def _reset_columns(self) -> None:
        self._steps, self._attempts, self._times = array("q"), array("q"), array("d")
        self._columns: dict[str, array[float]] = {}

    def refresh(self) -> None:
        """Read the lines that were added since the last call."""
        with self._lock:
            while True:
                before = self._lines.offset
                begins, lines = self._lines.new(_CHUNK)
                if begins:
                    self._reset_columns()
                for line in lines:
                    self._add_line(line)
                if self._lines.offset == before:
                    return

    def _add_line(self, line: dict[str, object]) -> None:
        self.lines_read += 1
        step = line.get("step")
        if not isinstance(step, int) or isinstance(step, bool) or not 0 <= step < 2**62:
            return
        if self._steps and step <= self._steps[-1]:
            self._cut_steps(bisect_left(self._steps, step))
        count = len(self._steps)
        self._steps.append(step)
        self._attempts.append(_read_whole(line.get("attempt")))
        self._times.append(_finite_number(line.get("time")))
        for name, value in line.items():
            if name in _NOT_METRICS or isinstance(value, bool) or not isinstance(value, int | float):
                continue
            column = self._columns.get(name)
            if column is None:
                shown = escape_controls(name)  # the name that the page shows and requests
                column = self._columns.get(shown)
                if column is None:
                    if len(self._columns) >= METRICS_MAX:
                        continue
                    column = self._columns[shown] = array("d", [math.nan]) * count
                if len(column) > count:
                    continue  # two names with the same displayed form: the first one is used
            column.append(_finite_number(value))
        for column in self._columns.values():
            if len(column) == count:
                column.append(math.nan)

    def _cut_steps(self, count: int) -> None:
        """Keep only the first `count` steps."""
        del self._steps[count:], self._attempts[count:], self._times[count:]
        for column in self._columns.values():
            del column[count:]

    @property
    def names(self) -> list[str]:
        """Sorted names of all metrics."""
        with self._lock:
            return sorted(self._columns.keys() - {FURTHEST})

    @property
    def bounds(self) -> tuple[int, int] | None:
        """First and last step, or None without steps."""
        with self._lock:
            return (self._steps[0], self._steps[-1]) if self._steps else None

    @property
    def attempts(self) -> dict[int, tuple[int, int]]:
        """First and last step of each attempt, without steps that a later attempt replaced."""
        with self._lock:
            found: dict[int, tuple[int, int]] = {}
            at = 0
            while at < len(self._attempts):  # attempts ascend: each takes one search
                attempt = self._attempts[at]
                after = bisect_right(self._attempts, attempt, lo=at)
                found[attempt] = (self._steps[at], self._steps[after - 1])
                at = max(after, at + 1)
            return found

    def step_times(self, first: int, last: int) -> tuple[float, float]:
        """Return the times of the first and the last of some steps, in seconds since the epoch; 0 if unknown."""
        with self._lock:
            begin, end = bisect_left(self._steps, first), bisect_right(self._steps, last)
            found = (self._times[begin], self._times[end - 1]) if begin < end else (0.0, 0.0)
        return (found[0] if math.isfinite(found[0]) else 0.0, found[1] if math.isfinite(found[1]) else 0.0)

    def metric_line(self, metric: str, first: int | None = None, last: int | None = None) -> Line:
        """Return the curve of a metric between two steps (inclusive), without values that are not numbers."""
        with self._lock:
            begin = 0 if first is None else bisect_left(self._steps, first)
            end = len(self._steps) if last is None else bisect_right(self._steps, last)
            column = self._columns.get(metric)
            values = column[begin:end] if column is not None else array("d")
            known = [
                (step, value) for step, value in zip(self._steps[begin:end], values, strict=False) if value == value
            ]
        return Line(metric, [step for step, _ in known], [value for _, value in known])


NO_STEPS = StepIndex(Path("/nonexistent/metrics.jsonl"))
"""Empty index for a run whose files are not read."""


def _read_whole(value: object) -> int:
    return value if isinstance(value, int) and 0 <= value < 2**62 else 0


def _finite_number(value: object) -> float:
    """Return a finite number, or NaN."""
    if not isinstance(value, int | float):
        return math.nan
    try:
        found = float(value)
    except OverflowError:
        return math.nan
    return found if math.isfinite(found) else math.nan
