"""Tail of a run's `metrics.jsonl` for the live view. It keeps a few numbers per step, because a whole line needs 11 KB of memory."""

from __future__ import annotations

import json
import math
import os
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from rlrun.protocol.files.metrics_line import MetricsLine, missing_answers

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

    def curve(self, name: str) -> list[float]:
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

    def poll(self) -> Iterator[MetricsLine]:
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
            known = None
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
