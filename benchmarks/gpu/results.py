"""Results that survive the process that makes them: after every row the whole table is on the disk, as JSON and as Markdown."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

STARTED = "did not come back"
"""State of a row that is being measured; it stays if the process ends there."""

TAIL_BYTES = 8_000


class Report:
    """Tables of one script: `NAME.json` and `NAME.md` in a folder.

    What an earlier process has put there stays, unless a `fresh` one is begun.
    """

    def __init__(self, folder: Path, name: str, title: str, *, fresh: bool = False) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.json, self.markdown, self.title = folder / f"{name}.json", folder / f"{name}.md", title
        self.sections: dict[str, dict[str, dict[str, Any]]] = {}
        if self.json.exists() and not fresh:
            self.sections = json.loads(self.json.read_text())["sections"]

    def put(self, section: str, row: str, values: Mapping[str, Any]) -> None:
        """Add a row, or replace it, and write both files."""
        self.sections.setdefault(section, {})[row] = dict(values)
        _write(self.json, json.dumps({"title": self.title, "sections": self.sections}, indent=1))
        _write(self.markdown, self.text())

    def begin(self, section: str, row: str) -> None:
        """Say that a row is being measured: a process that dies of it leaves this behind."""
        self.put(section, row, {"note": STARTED})

    def has(self, section: str, row: str) -> bool:
        """Existence of a result of the row, measured or failed."""
        return row in self.sections.get(section, {})

    def text(self) -> str:
        """All sections as Markdown; a value that a row lacks is a dash."""
        lines = [f"# {self.title}"]
        for section, rows in self.sections.items():
            columns = list(dict.fromkeys(name for row in rows.values() for name in row if name != "note"))
            columns += ["note"] if any("note" in row for row in rows.values()) else []
            lines += ["", f"## {section}", "", _line(["", *columns]), "|" + "---|" * (len(columns) + 1)]
            lines += [_line([name, *(_cell(row.get(column)) for column in columns)]) for name, row in rows.items()]
        return "\n".join(lines) + "\n"


def _write(path: Path, text: str) -> None:
    new = path.with_suffix(path.suffix + ".new")
    new.write_text(text)
    new.replace(path)


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1000 else f"{value:.0f}"
    return str(value).replace("|", "\\|").replace("\n", " ")


@dataclass(frozen=True)
class Deadline:
    """When a script stops by itself."""

    at: float
    """Moment of `time.monotonic`, in seconds."""

    @classmethod
    def after(cls, seconds: float) -> Deadline:
        return cls(time.monotonic() + seconds)

    @property
    def left(self) -> float:
        """Seconds."""
        return self.at - time.monotonic()


@dataclass(frozen=True)
class Ended:
    """How a process ended."""

    code: int | None
    """None: it was stopped at its limit."""
    tail: str
    """The end of what it said."""


def run_limited(
    command: Sequence[str],
    seconds: float,
    log: Path,
    environment: Mapping[str, str],
    stalled: Callable[[], bool] = lambda: False,
) -> Ended:
    """Run a process of its own for at most `seconds`, or until it is `stalled`; what it says is appended to `log`."""
    limit = Deadline.after(seconds)
    with log.open("ab") as file:
        begin = file.tell()
        process = subprocess.Popen(
            list(command), stdout=file, stderr=subprocess.STDOUT, env={**os.environ, **environment}
        )
        try:
            while True:
                with suppress(subprocess.TimeoutExpired):
                    code: int | None = process.wait(max(min(limit.left, 1.0), 0.01))
                    break
                if limit.left <= 0 or stalled():
                    code = None
                    break
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    with log.open("rb") as file:
        file.seek(max(begin, log.stat().st_size - TAIL_BYTES))
        return Ended(code, file.read().decode(errors="replace"))


def reason(ended: Ended, seconds: float) -> str:
    """In a few words why a row has no numbers."""
    if ended.code is None:
        return f"stopped: it hung, or the {seconds:.0f} s were over"
    lines = [line.strip() for line in ended.tail.splitlines() if line.strip()]
    if any("OutOfMemoryError" in line or "out of memory" in line for line in lines):
        return "out of memory"
    said = next((line for line in reversed(lines) if "Error" in line), lines[-1] if lines else "")
    return f"exit code {ended.code}: {said[-160:]}"
