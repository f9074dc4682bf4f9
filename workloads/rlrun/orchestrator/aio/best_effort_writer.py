"""Best-effort background writer for files for people, such as metrics and traces."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable

from loguru import logger

RETRY_SECONDS = 5.0
"""Pause before the next attempt to write a kept file."""
_WAITING = 64
"""Limit of queued files; further files are dropped with a warning."""
CLOSE_SECONDS = 5.0
"""Timeout at the end for the next file. Each written file restarts it."""


class BestEffortWriter:
    """Writer of files in the order of the calls. Files that the volume refuses are dropped, or kept and written later."""

    def __init__(self) -> None:
        self._jobs: queue.Queue[tuple[str, Callable[[], None], bool] | None] = queue.Queue()
        self._closing = threading.Event()
        self._refused = False
        self._ends = float("inf")
        """Time (monotonic seconds) after which only kept files are written."""
        self._done = 0
        """Number of files written or dropped."""
        self._thread = threading.Thread(target=self._run, name="best-effort-writer", daemon=True)
        self._thread.start()

    def write(self, what: str, act: Callable[[], None], *, keep: bool = False) -> None:
        """Queue a file. Returns at once and never fails.

        Args:
            what: name of the file, for the log.
            act: function that writes the file completely or not at all.
            keep: whether to retry until the end of the role, before any later file; only for small files. Other
                files are dropped if the volume refuses them or if too many files are queued.
        """
        if keep or self._jobs.qsize() < _WAITING:
            self._jobs.put((what, act, keep))
        else:
            self._refuse(f"{what} is not written: {_WAITING} files already wait for the volume")

    def close(self) -> None:
        """Write the queued files. Kept files may take as long as the volume makes progress; a volume that refuses or
        hangs ends the wait after `CLOSE_SECONDS`.
        """
        self._ends = time.monotonic() + CLOSE_SECONDS
        self._closing.set()
        self._jobs.put(None)
        done = -1
        while self._thread.is_alive() and done < self._done:
            done = self._done
            self._thread.join(CLOSE_SECONDS)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            what, act, keep = job
            is_last = self._closing.is_set()
            if keep or time.monotonic() <= self._ends:
                while not self._try(what, act) and keep and not is_last:
                    is_last = self._closing.wait(RETRY_SECONDS)  # one last retry after the pause
            else:
                self._refuse(f"{what} is not written: the run ends and the volume is slow")
            self._done += 1

    def _try(self, what: str, act: Callable[[], None]) -> bool:
        began = time.monotonic()
        try:
            act()
        except Exception as error:
            self._refuse(f"cannot write {what}; the run continues without it: {error}")
            return False
        if self._refused:
            self._refused = False
            logger.info(f"{what} is written; the volume accepts files again, after {time.monotonic() - began:.1f} s")
        return True

    def _refuse(self, message: str) -> None:
        if not self._refused:  # once per outage
            logger.warning(message)
        self._refused = True
