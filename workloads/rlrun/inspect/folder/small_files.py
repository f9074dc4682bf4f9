"""Small files of a run's folder, the ends of large ones, and their lines one at a time; a damaged or missing one is empty."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from rlrun.protocol.files.paths import RunPaths

_TAIL_BYTES = 256 * 1024


def tail_text(path: Path, size: int = _TAIL_BYTES) -> str:
    """End of a file, from the beginning of a line; empty: there is none."""
    try:
        with path.open("rb") as file:
            length = file.seek(0, os.SEEK_END)
            file.seek(max(0, length - size))
            content = file.read()
    except OSError:
        return ""
    return (content if length <= size else content.partition(b"\n")[2]).decode(errors="replace")


def tail_lines(path: Path, size: int = _TAIL_BYTES) -> list[dict[str, object]]:
    """Last whole lines of a JSONL file; a torn or damaged one is left out."""
    whole, newline, _ = tail_text(path, size).rpartition("\n")
    return json_lines(whole + newline)


def json_lines(text: str) -> list[dict[str, object]]:
    """Objects of JSON lines; a line that is none is left out."""
    return [document for line in text.splitlines() if (document := _parse(line)) is not None]


def each_line(path: Path) -> Iterator[dict[str, object]]:
    """Yield the objects of a JSONL file one at a time; a line that is not an object is left out. Memory stays that of one line."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        for line in file:
            if (document := _parse(line)) is not None:
                yield document


def _parse(line: str | bytes) -> dict[str, object] | None:
    try:
        document = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return document if isinstance(document, dict) else None


def read_config(paths: RunPaths, numbers: Sequence[int]) -> dict[str, object]:
    """Configuration of one role, which has the fields of all; of roles started by hand, that in the logs of the newest attempt."""
    config = read_json(paths.run_json)
    found = [one for name in ("trainer", "orchestrator") if isinstance(one := config.get(name), dict)]
    if not found and numbers:
        found = [read_json(paths.logs(numbers[-1], role) / "config.json") for role in ("trainer", "orchestrator")]
    return next((one for one in found if one), {})


def read_json(path: Path) -> dict[str, object]:
    """Object of a JSON file; empty: there is none."""
    try:
        document = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}


def modified_at(path: Path) -> float | None:
    """Time of a file's last change, in seconds since the epoch; None: there is none."""
    try:
        return path.stat().st_mtime
    except OSError:
        return None
