"""Small files of a run's folder, and the ends of large ones; a damaged or missing one is empty."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
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
    found = []
    for line in text.splitlines():
        try:
            document = json.loads(line)
        except ValueError:
            continue
        if isinstance(document, dict):
            found.append(document)
    return found


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
    except (OSError, ValueError):
        return {}
    return document if isinstance(document, dict) else {}


def modified_at(path: Path) -> float | None:
    """Time of a file's last change, in seconds since the epoch; None: there is none."""
    try:
        return path.stat().st_mtime
    except OSError:
        return None
