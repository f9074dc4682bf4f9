"""Output of a role: forwarded to the container's log, kept on the run's volume, and its end kept in memory.

The volume may be full or hang. Therefore a separate thread writes to it, and drops data that it cannot write in time, so that the role
never waits for it.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from pathlib import Path

from rlrun.protocol.files.failures import telling_lines
from rlrun.runtime.bounded_log import BoundedLog

_CHUNK_BYTES = 64 * 1024
KEPT_BYTES = 64 * 1024
"""Bytes at the end of each stream that are kept in memory."""
_WAITING_CHUNKS = 1024
"""Maximum number of chunks that wait for the volume."""
CLOSE_SECONDS = 5.0
STDOUT, STDERR = 1, 2


class Output:
    """Standard output and error of a role, with a log file.

    Args:
        log: log file on the run's volume, or None.
    """

    def __init__(self, log: Path | None) -> None:
        self._log = log
        self._ends = {STDOUT: b"", STDERR: b""}
        self._chunks: queue.Queue[bytes | None] = queue.Queue(_WAITING_CHUNKS)
        self._readers: list[threading.Thread] = []
        self._writer = threading.Thread(target=self._write_log, name="log", daemon=True)
        if log is not None:
            self._writer.start()

    def say(self, message: str) -> None:
        """Log a line of this process itself."""
        self._take(STDERR, f"{time.strftime('%H:%M:%S')} | INFO    | pod | {message}\n".encode(), remember=False)

    def show(self, text: bytes) -> None:
        """Write only to the container's log."""
        _write(STDERR, text)

    def pump(self, source: int, stream: int) -> None:
        """Forward a file descriptor's data until its end, in the background; then close it.

        Args:
            source: reading end of a pipe.
            stream: `STDOUT` or `STDERR`.
        """

        def run() -> None:
            with os.fdopen(source, "rb", buffering=0) as pipe:
                while chunk := pipe.read(_CHUNK_BYTES):
                    self._take(stream, chunk)

        thread = threading.Thread(target=run, name=f"output-{stream}", daemon=True)
        thread.start()
        self._readers.append(thread)

    def end(self) -> str:
        """Return the end of stderr, or of stdout if stderr is empty."""
        return (self._ends[STDERR] or self._ends[STDOUT]).decode(errors="replace")

    def last_lines(self, count: int = 15) -> list[str]:
        """Return the most informative lines of the end."""
        return telling_lines(self.end(), count)

    def drain(self) -> None:
        """Wait until the pipes have ended, but only shortly: an unkillable process may hold one open."""
        _join(self._readers)

    def close(self) -> None:
        """Pass the last lines to the volume; waits only shortly, because the volume may hang."""
        self.drain()
        if self._log is not None:
            _put(self._chunks, None)
            _join([self._writer])

    def _take(self, stream: int, chunk: bytes, *, remember: bool = True) -> None:
        if remember:
            self._ends[stream] = (self._ends[stream] + chunk)[-KEPT_BYTES:]
        _write(stream, chunk)
        if self._log is not None:
            _put(self._chunks, chunk)

    def _write_log(self) -> None:
        assert self._log is not None
        file = BoundedLog(self._log)  # the container's log has these bytes as well
        while (chunk := self._chunks.get()) is not None:
            file.append(chunk)


def _write(stream: int, chunk: bytes) -> None:
    try:
        view = memoryview(chunk)
        while view:
            view = view[os.write(stream, view) :]
    except OSError:  # the container's log has no reader any more: the role continues
        pass


def _put(chunks: queue.Queue[bytes | None], chunk: bytes | None) -> None:
    try:
        chunks.put_nowait(chunk)
    except queue.Full:
        return


def _join(threads: list[threading.Thread]) -> None:
    deadline = time.monotonic() + CLOSE_SECONDS
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
