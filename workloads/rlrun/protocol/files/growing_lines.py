"""Reader of JSONL files that grow, such as `metrics.jsonl`: each whole line once."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path


class Lines:
    """Whole lines of a JSONL file that grows, or is replaced by another. A line that is not JSON is left out."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset, self._last = 0, b""
        """Position at which reading goes on, and the line that ends there: another one is of another file."""

    @property
    def offset(self) -> int:
        """Bytes of the file that were read."""
        return self._offset

    def new(self, most: int | None = None) -> tuple[bool, list[dict[str, object]]]:
        """True if reading has begun at the start of the file, and the whole lines that are new since the call before.

        Args:
            most: bytes to read at most, or one line if that is longer; call again until nothing comes. None: all.
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
