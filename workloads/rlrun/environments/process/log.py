"""Log of an environment: a file with a size limit, and its last bytes in memory."""

from __future__ import annotations

import os
import threading
from pathlib import Path

from rlrun.runtime.bounded_log import BoundedLog
from rlrun.runtime.printable import printable

MAX_BYTES = 8 * 1024 * 1024
KEPT_BYTES = 16 * 1024
_CHUNK_BYTES = 64 * 1024


class Log:
    """Log of an environment across all restarts of its process.

    Args:
        path: log file, which is created with its folder at the first output. None: keep only the last bytes in memory.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._file = None if path is None else BoundedLog(path, MAX_BYTES)
        self._end = b""
        self._lock = threading.Lock()

    def follow(self, source: int) -> threading.Thread:
        """Start a thread that reads a descriptor to its end and then closes it.

        The thread also reads on if the file cannot be written, so an environment never waits for its log.
        """

        def run() -> None:
            with os.fdopen(source, "rb", buffering=0) as pipe:
                while chunk := pipe.read(_CHUNK_BYTES):
                    self._take(chunk)

        with self._lock:
            self._end = b""
        thread = threading.Thread(target=run, name="environment-log", daemon=True)
        thread.start()
        return thread

    def last_lines(self, count: int = 8, *, whole: bool = False) -> list[str]:
        """Return the last lines that the current process printed, each cut to 300 characters.

        Args:
            count: largest number of lines.
            whole: whether to leave out a last line without a newline.
        """
        with self._lock:
            text = self._end.decode(errors="replace")
        if whole:
            text = text[: text.rfind("\n") + 1]
        lines = (printable(line[:300].strip()) for line in text.splitlines())
        return [line for line in lines if line][-count:]

    def _take(self, chunk: bytes) -> None:
        with self._lock:
            self._end = (self._end + chunk)[-KEPT_BYTES:]
        if self._file is not None:
            self._file.append(chunk)  # if the volume is full or missing, `_end` is still available
