"""A role's output: passed on to the container's log as it comes, kept on the run's volume, and its end remembered.

Best effort on the volume, which may be full or hang: a thread of its own writes, and drops what it cannot take in time, so that the
role never waits for it.
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
"""The end of each stream that is remembered."""
_WAITING_CHUNKS = 1024
"""Chunks that may wait for the volume."""
CLOSE_SECONDS = 5.0
STDOUT, STDERR = 1, 2


class Output:
    """Two streams and a file.

    Args:
        log: the file on the run's volume; None: none.
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
        """A line of this process itself."""
        self._take(STDERR, f"{time.strftime('%H:%M:%S')} | INFO    | pod | {message}\n".encode(), remember=False)

    def show(self, text: bytes) -> None:
        """Write to the container's log alone."""
        _write(STDERR, text)

    def pump(self, source: int, stream: int) -> None:
        """Pass on what comes from a file descriptor until its end, in the background; the descriptor is closed then.

        Args:
            source: the reading end of a pipe.
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
        """The end of stderr, or of stdout when there is nothing there."""
        return (self._ends[STDERR] or self._ends[STDOUT]).decode(errors="replace")

    def last_lines(self, count: int = 15) -> list[str]:
        """Most informative lines of the end."""
        return telling_lines(self.end(), count)

    def drain(self) -> None:
        """Wait until the pipes have ended; for a moment only, should a process that cannot be killed hold one open."""
        _join(self._readers)

    def close(self) -> None:
        """Hand the last lines to the volume; for a moment only, should it hang."""
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
        file = BoundedLog(self._log)  # these bytes are in the container's log as well
        while (chunk := self._chunks.get()) is not None:
            file.append(chunk)


def _write(stream: int, chunk: bytes) -> None:
    try:
        view = memoryview(chunk)
        while view:
            view = view[os.write(stream, view) :]
    except OSError:  # nothing reads the container's log any more: the role goes on
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
