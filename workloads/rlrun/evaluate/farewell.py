"""Last words of `eval` and `synthesize`: what is kept, where things are, and the command that goes on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from rlrun.evaluate.answers import ANSWERS
from rlrun.local.farewell import rows_text
from rlrun.protocol.files.failures import volume_is_full


def stopped_lines(work: Path, log: Path, command: str, *, failed: bool) -> str:
    """Lines after a signal or a failure.

    Args:
        work: folder of the command's answers.
        log: file of its log.
        command: the command itself, which goes on.
        failed: False after a signal.
    """
    return rows_text(_stopped_text(work, log, command, failed=failed))


def _stopped_text(work: Path, log: Path, command: str, *, failed: bool) -> Iterator[tuple[str, str]]:
    count = _count_answered(work / ANSWERS)
    answers = f"{count} answer{'s' if count > 1 else ''} in {short_path(work / ANSWERS)}"
    yield "saved", f"{answers}, of which none is asked again" if count else "nothing is answered yet"
    if log.is_file():
        yield "log", short_path(log)
    logs = work / "logs"
    if logs.is_dir():
        yield "logs", short_path(logs)
    if volume_is_full(work):
        yield "full", f"the volume of {work} has no room"
    yield "repair the cause, then go on" if failed else "go on", command


def short_path(path: Path) -> str:
    """A path as short as it can be typed from here."""
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)


def _count_answered(folder: Path) -> int:
    """Answers in a folder's files, without those that failed; a damaged line is none."""
    count = 0
    for file in folder.rglob("*.jsonl") if folder.is_dir() else ():
        for line in file.read_bytes().splitlines():
            try:
                document = json.loads(line)
            except ValueError:
                continue
            count += isinstance(document, dict) and "error" not in document
    return count
