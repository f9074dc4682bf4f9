"""Readers for small files of a run's folder, and for the ends and lines of large ones; a damaged or missing file is empty."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from rlrun.protocol.files.paths import RunPaths

_TAIL_BYTES = 256 * 1024


def tail_text(path: Path, size: int = _TAIL_BYTES) -> str:
    """Return the end of a file from the start of a line, or an empty text."""
    return read_tail(path, size)[0].decode(errors="replace")


def read_tail(path: Path, size: int) -> tuple[bytes, int]:
    """Return the end of a file from the start of a line, and the offset after it in bytes.

    Args:
        path: file; an unreadable one is empty.
        size: approximate number of bytes.
    """
    try:
        with path.open("rb") as file:
            length = file.seek(0, os.SEEK_END)
            start = file.seek(max(0, length - size))
            content = file.read()
    except OSError:
        return b"", 0
    # The offset includes bytes that were written after the measurement of the length.
    return (content if start == 0 else content.partition(b"\n")[2]), start + len(content)


def tail_lines(path: Path, size: int = _TAIL_BYTES) -> list[dict[str, object]]:
    """Return the last complete lines of a JSONL file; damaged lines are skipped."""
    whole, newline, _ = tail_text(path, size).rpartition("\n")
    return json_lines(whole + newline)


def json_lines(text: str) -> list[dict[str, object]]:
    """Return the objects in JSON lines; other lines are skipped."""
    return [document for line in text.splitlines() if (document := _parse_object(line)) is not None]


def each_line(path: Path) -> Iterator[dict[str, object]]:
    """Yield the objects of a JSONL file, one line in memory at a time; lines that are not objects are skipped."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        for line in file:
            if (document := _parse_object(line)) is not None:
                yield document


def _parse_object(line: str | bytes) -> dict[str, object] | None:
    try:
        document = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return document if isinstance(document, dict) else None


def read_config(paths: RunPaths, numbers: Sequence[int]) -> dict[str, object]:
    """Return the configuration of one role with the run's shared fields; for roles started by hand, from the newest attempt's logs."""
    config = read_json(paths.run_json)
    found = [one for name in ("trainer", "orchestrator") if isinstance(one := config.get(name), dict)]
    if not found and numbers:
        found = [read_json(paths.logs(numbers[-1], role) / "config.json") for role in ("trainer", "orchestrator")]
    return next((one for one in found if one), {})


def read_json(path: Path) -> dict[str, object]:
    """Return the object of a JSON file, or an empty one."""
    try:
        document = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}


def modified_at(path: Path) -> float | None:
    """Return the time of a file's last change in seconds since the epoch, or None."""
    try:
        return path.stat().st_mtime
    except OSError:
        return None
