"""Reader of growing JSONL files such as `metrics.jsonl`: it returns each complete line once."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path


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
