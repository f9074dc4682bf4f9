"""Final lines of `eval` and `synthesize`: saved answers, logs, and the command that continues."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from rlrun.evaluate.answers import ANSWERS
from rlrun.local.farewell import rows_text
from rlrun.protocol.files.failures import volume_is_full


def stopped_lines(work: Path, log: Path, command: str, *, failed: bool) -> str:
    """Return the lines after a signal or a failure.

    Args:
        work: folder of the command's answers.
        log: path of its log.
        command: command line that continues the work.
        failed: whether it failed; False after a signal.
    """
    return rows_text(_stopped_text(work, log, command, failed=failed))


def _stopped_text(work: Path, log: Path, command: str, *, failed: bool) -> Iterator[tuple[str, str]]:
    count = _count_answered(work / ANSWERS)
    answers = f"{count} answer{'s' if count > 1 else ''} in {short_path(work / ANSWERS)}"
    yield "saved", f"{answers}, which will not be requested again" if count else "no answers yet"
    if log.is_file():
        yield "log", short_path(log)
    logs = work / "logs"
    if logs.is_dir():
        yield "logs", short_path(logs)
    if volume_is_full(work):
        yield "full", f"the volume of {work} has no free space"
    yield "repair the cause, then continue" if failed else "continue", command


def short_path(path: Path) -> str:
    """Return the shortest form of a path from the current folder."""
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)


def _count_answered(folder: Path) -> int:
    """Count the answers in a folder's files, without failures and damaged lines."""
    count = 0
    for file in folder.rglob("*.jsonl") if folder.is_dir() else ():
        for line in file.read_bytes().splitlines():
            try:
                document = json.loads(line)
            except ValueError:
                continue
            count += isinstance(document, dict) and "error" not in document
    return count
