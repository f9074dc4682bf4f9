"""Output of an environment: kept in a file of bounded size, and its end remembered."""

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
    """The environment's log, over all lives of its process.

    Args:
        path: the file, made with its folder when something is printed; None: only the end is remembered.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._file = None if path is None else BoundedLog(path, MAX_BYTES)
        self._end = b""
        self._lock = threading.Lock()

    def follow(self, source: int) -> threading.Thread:
        """Take what comes from a descriptor until its end, in a thread; the descriptor is closed then.

        Whatever happens to the file, the pipe is read on: an environment never waits for its log.
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
        """The end of what the present process printed; lines are cut to 300 characters.

        Args:
            count: at most so many lines.
            whole: without a last line that has no end yet.
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
            self._file.append(chunk)  # where the volume is full or gone, the end is remembered all the same
