"""Live view of a run: a panel on a terminal, and one line per step otherwise.

The view follows `metrics.jsonl` and keeps a few numbers per step, because a whole line needs 11 KB of memory.
"""

from __future__ import annotations

import json
import math
import os
import re
import time
import urllib.error
import urllib.request
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from rlrun.protocol.files.metrics_line import MetricsLine, missing_answers
from rlrun.protocol.messages.endpoints import ORCHESTRATOR_PROGRESS
from rlrun.runtime.json_types import Json
from rlrun.runtime.printable import escape_controls

_CHUNK_BYTES = 1024 * 1024
_CURVES = ("reward/mean", "loss")


class History:
    """Summary of one file's lines for the live view."""

    def __init__(self) -> None:
        self.last: MetricsLine = {}
        """Newest line of a step, or an empty mapping."""
        self.held_out: list[str] = []
        """First and newest held-out results, such as `v30 0.512`."""
        self._curves = {name: array("d") for name in _CURVES}

    def add(self, line: MetricsLine) -> None:
        """Add a line to the summary."""
        for key, value in line.items():
            if (key.startswith("eval/") and key.endswith("reward/mean")) or key == "validation/loss":
                missing = missing_answers(line, key.removesuffix("reward/mean"))
                self.held_out = [*self.held_out[:1], f"v{line['step']} {value:.3f}{missing}"]
        if line["step"] > 0:
            self.last = line
            for name, curve in self._curves.items():
                if (point := line.get(name)) is not None and math.isfinite(point):
                    curve.append(point)

    def curve_values(self, name: str) -> list[float]:
        """Return the values of `reward/mean` or `loss` of all steps that have one."""
        return list(self._curves[name])


class MetricsTail:
    """Reader that follows `metrics.jsonl`. Each attempt replaces the file by the lines that it keeps. Only lines with a newline are read.

    Args:
        path: metrics file, which may not exist yet.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.history = History()
        self._seen = array("q")
        """Hash of each line of the file, to detect lines that a new file has in common with it."""
        self._file: BinaryIO | None = None
        """Open file. While it is open, no other file can get its inode, so a new file with the same name is always detected."""
        self._offset = 0

    @property
    def is_empty(self) -> bool:
        """Whether the file has no line yet."""
        return not self._seen

    def read_new_lines(self) -> Iterator[MetricsLine]:
        """Yield lines that are new since the last call. Of a new file, lines that it shares with the previous file are skipped."""
        try:
            file, known = self._open_current()
        except OSError:
            return
        for text in self._whole_lines(file):
            if (line := _parse_line(text)) is None:
                continue
            self._seen.append(hash(text))
            self.history.add(line)
            number = len(self._seen)
            if known is not None and known[number - 1 : number] == self._seen[number - 1 :]:
                continue
            known = None  # from the first different line on, all lines are new
            yield line

    def _whole_lines(self, file: BinaryIO) -> Iterator[bytes]:
        """Yield lines after the offset, and advance the offset after each chunk."""
        most = _CHUNK_BYTES
        while True:
            try:
                file.seek(self._offset)
                content = file.read(most)
            except OSError:
                return
            whole = content[: content.rfind(b"\n") + 1]
            if not whole and len(content) < most:
                return
            most = _CHUNK_BYTES if whole else 2 * most
            self._offset += len(whole)
            yield from whole.splitlines()

    def _open_current(self) -> tuple[BinaryIO, array[int] | None]:
        """Return the current file, and the hashes of the previous file's lines if the file is a new one.

        Raises:
            OSError: the file does not exist.
        """
        there = self.path.stat()
        if (
            self._file is not None
            and os.path.samestat(there, os.fstat(self._file.fileno()))
            and there.st_size >= self._offset
        ):
            return self._file, None
        self.close()
        self._offset, self.history = 0, History()
        known, self._seen = self._seen, array("q")
        self._file = self.path.open("rb")
        return self._file, known

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None


def _parse_line(text: bytes) -> MetricsLine | None:
    """Parse one line. Returns None for a damaged line."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    whole = isinstance(found, dict) and isinstance(found.get("step"), int)
    return found if whole and all(isinstance(value, int | float) for value in found.values()) else None


_SPARKS = "▁▂▃▄▅▆▇█"
_SINCE = re.compile(r" since [^\s;]+")
"""Start time of a wait. It is removed, because the printed line already contains the elapsed time."""
_POLL_TIMEOUT_SECONDS = 2.0


def show_duration(seconds: float | None) -> str:
    """Return a duration as `1h02m`, `3m07s`, `12s`, or a dash for None."""
    if seconds is None:
        return "–"
    whole = int(seconds)
    if whole >= 3600:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 60}m{whole % 60:02d}s" if whole >= 60 else f"{whole}s"


def draw_sparkline(values: list[float], width: int = 60) -> str:
    """Return the values as bars from the lowest to the highest value, averaged to at most `width` characters."""
    if not values:
        return ""
    size = max(1, -(-len(values) // width))
    means = [sum(values[i : i + size]) / len(values[i : i + size]) for i in range(0, len(values), size)]
    low, high = min(means), max(means)
    span = (high - low) or 1.0
    return "".join(_SPARKS[min(7, int((value - low) / span * 8))] for value in means)


def read_progress(url: str, api_key: str) -> Json | None:
    """Return the orchestrator's progress, or None while it does not answer."""
    request = urllib.request.Request(url + ORCHESTRATOR_PROGRESS, headers={"Authorization": f"Bearer {api_key}"})
    try:
        with urllib.request.urlopen(request, timeout=_POLL_TIMEOUT_SECONDS) as answer:
            document = json.load(answer)
    except (OSError, ValueError, urllib.error.URLError):
        return None
    return document if isinstance(document, dict) else None


def step_line(line: MetricsLine, max_steps: int) -> str:
    """Return one step as text."""
    parts = [f"step {line['step']}/{max_steps}"]
    for key, label, form in (
        ("reward/mean", "reward", ".3f"),
        ("loss", "loss", ".4f"),
        ("validation/loss", "validation loss", ".4f"),
        ("mismatch_kl", "mismatch_kl", ".1e"),
        ("off_policy/mean", "staleness", ".2f"),
        ("perf/throughput", "tokens/s", ".0f"),
        ("time/step", "step time", ".2f"),
    ):
        if line.get(key) is not None:
            parts.append(
                f"{label} {_without_sign_of_zero(f'{line[key]:{form}}')}" + ("s" if key == "time/step" else "")
            )
    parts += [
        f"{key} {value:.3f}{missing_answers(line, key.removesuffix('reward/mean'))}"
        for key, value in line.items()
        if key.startswith("eval/") and key.endswith("reward/mean")
    ]
    return "  ".join(parts)


def _trouble_of(progress: Json) -> str:
    """Current problem of the volume that makes the run wait, without its start time; empty if there is no problem."""
    found = progress.get("storage")
    text = found.get("text") if isinstance(found, dict) else None
    return escape_controls(str(text)).split(" since")[0] if text else ""


def _without_sign_of_zero(text: str) -> str:
    """Remove the sign of a rounded zero, so that a tiny negative number is not shown as `-0.0000`."""
    return text.removeprefix("-") if not text.strip("-0.") else text


class View:
    """View of a running run.

    Args:
        console: console to draw on.
        name: name of the run.
        max_steps: number of steps. None: show the orchestrator's counts and results instead of steps.
        metrics: metrics file of the run.
        url: address of the orchestrator's progress.
        api_key: key of the run.
        plain: whether to print lines instead of a panel.
    """

    def __init__(
        self, console: Console, *, name: str, max_steps: int | None, metrics: Path, url: str, api_key: str, plain: bool
    ) -> None:
        self._console, self._name, self._max_steps = console, name, max_steps
        self._tail, self._url, self._api_key, self._plain = MetricsTail(metrics), url, api_key, plain
        self._began = time.monotonic()
        self._waiting = ""
        self._trouble = ""
        self._answered = False
        self._results: list[str] = []
        self._live: Live | None = None
        self.progress: Json | None = None
        """Orchestrator's answer at the last `update`, or None if there was no answer."""
        for _ in self._tail.read_new_lines():  # skip the lines of earlier attempts
            pass

    def __enter__(self) -> View:
        if not self._plain:
            self._live = Live(console=self._console, refresh_per_second=4, transient=True)
            self._live.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        self._tail.close()
        if self._live is not None:
            self._live.__exit__(None, None, None)

    def update(self, roles: str) -> None:
        """Read the orchestrator's progress and draw it.

        Args:
            roles: line about the processes, which is shown while the orchestrator does not answer.
        """
        new = list(self._tail.read_new_lines())
        progress = self.progress = read_progress(self._url, self._api_key)
        self._answered = self._answered or progress is not None
        waiting = escape_controls(
            str((progress or {}).get("waiting_on") or ("the roles to end" if self._answered else roles))
        )
        results = [escape_controls(str(line)) for line in (progress or {}).get("results") or ()]
        known, self._results = self._results, results or self._results
        if self._plain:
            self._print_news(new, self._results[len(known) :], waiting)
        elif self._live is not None:
            draw = self._draw_panel if self._max_steps is not None else self._draw_counts
            self._live.update(draw(progress or {}, waiting))

    def _print_news(self, new: Sequence[MetricsLine], results: Sequence[str], waiting: str) -> None:
        """Print new steps, results and problems of the volume and, before the first step, the reason for waiting."""
        progress = self.progress
        for line in new:
            self._console.print(step_line(line, self._max_steps or 0), highlight=False, soft_wrap=True)
        for result in results:
            self._console.print(result, highlight=False, soft_wrap=True, markup=False)
        if progress is not None and (trouble := _trouble_of(progress)) != self._trouble:
            self._trouble = trouble
            text = trouble or "the volume can be written again"
            self._console.print(text, highlight=False, soft_wrap=True, markup=False)
        if self._tail.is_empty and waiting.split(" since")[0] != self._waiting:
            self._waiting = waiting.split(" since")[0]
            text = f"[{show_duration(time.monotonic() - self._began)}] {_SINCE.sub('', waiting)}"
            self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def _draw_counts(self, progress: Json, waiting: str) -> Group:
        """Panel of a run without training."""
        done, total = int(progress.get("step") or 0), int(progress.get("max_steps") or 0)
        table, bar = Table.grid(padding=(0, 2)), Table.grid()
        table.add_row(
            *("answers", f"{done}/{total}", "ETA", show_duration(progress.get("eta_seconds"))),
            *(
                "elapsed",
                show_duration(time.monotonic() - self._began),
                "in flight",
                _show_value(progress.get("in_flight")),
            ),
        )
        bar.add_row(ProgressBar(total=max(1, total), completed=done, width=72))
        lines = [Text(line) for line in self._results]
        return Group(Text(self._name, style="bold"), bar, table, *lines, Text(f"waiting for: {waiting}", style="dim"))

    def _draw_panel(self, progress: Json, waiting: str) -> Group:
        history = self._tail.history
        last = history.last
        step, total = int(last.get("step", 0)), self._max_steps or 0
        table = Table.grid(padding=(0, 2))
        eta = progress.get("eta_seconds")
        table.add_row(
            "step",
            f"{step}/{total}",
            "ETA",
            show_duration(eta),
            "elapsed",
            show_duration(time.monotonic() - self._began),
        )
        supervised = "reward/mean" not in last and "loss" in last
        table.add_row(
            "loss" if supervised else "reward",
            _show_number(last.get("loss" if supervised else "reward/mean"), ".3f"),
            "tokens/s",
            _show_number(last.get("perf/throughput"), ".0f"),
            "staleness",
            _show_number(last.get("off_policy/mean"), ".2f"),
        )
        table.add_row(
            "held-out",
            " → ".join(history.held_out) or "–",
            "version",
            _show_value(progress.get("policy_version")),
            "in flight",
            _show_value(progress.get("in_flight")),
        )
        bar = Table.grid()  # a progress bar outside of a grid would not end its line
        bar.add_row(ProgressBar(total=total, completed=step, width=72))
        curve = history.curve_values("loss" if supervised else "reward/mean")
        return Group(
            Text(self._name, style="bold"),
            bar,
            table,
            Text(draw_sparkline(curve), style="green"),
            Text(f"waiting for: {waiting}", style="dim"),
        )


def _show_number(value: float | None, form: str) -> str:
    return "–" if value is None else f"{value:{form}}"


def _show_value(value: object) -> str:
    return "–" if value is None else str(value)
