"""Best-effort background writer for files for people, such as metrics and traces."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable

from loguru import logger

RETRY_SECONDS = 5.0
"""Pause before a kept file is tried again."""
_WAITING = 64
"""Files that may wait for the volume; later ones are left out."""
CLOSE_SECONDS = 5.0
"""Longest wait at the end for the next file; one that is written starts it again."""


class BestEffortWriter:
    """Writes in the order in which it was asked. What the volume refuses is left out, or kept until it is taken."""

    def __init__(self) -> None:
        self._jobs: queue.Queue[tuple[str, Callable[[], None], bool] | None] = queue.Queue()
        self._closing = threading.Event()
        self._refused = False
        self._ends = float("inf")
        """Time on the monotonic clock from which on only kept files are written."""
        self._done = 0
        """Files that were written, or left out."""
        self._thread = threading.Thread(target=self._run, name="best-effort-writer", daemon=True)
        self._thread.start()

    def write(self, what: str, act: Callable[[], None], *, keep: bool = False) -> None:
        """Have `act` write `what`, some time. Returns at once, and never fails.

        Args:
            what: the name of the file, for the log.
            act: writes it whole or leaves nothing.
            keep: small and wanted later: tried again while the role lives, before anything else. Otherwise it is left out when the volume
                refuses, or has so much else to take.
        """
        if keep or self._jobs.qsize() < _WAITING:
            self._jobs.put((what, act, keep))
        else:
            self._refuse(f"{what} is left out: the volume takes nothing")

    def close(self) -> None:
        """Hand the rest to the volume: kept files as long as it takes one after the other; for a moment only, should it refuse or hang."""
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
                    is_last = self._closing.wait(RETRY_SECONDS)  # the volume may be well again by then: tried once more
            else:
                self._refuse(f"{what} is left out: the run ends, and the volume is slow")
            self._done += 1

    def _try(self, what: str, act: Callable[[], None]) -> bool:
        began = time.monotonic()
        try:
            act()
        except Exception as error:
            self._refuse(f"{what} cannot be written, which the run survives: {error}")
            return False
        if self._refused:
            self._refused = False
            logger.info(f"{what} is written again, after {time.monotonic() - began:.1f} s")
        return True

    def _refuse(self, message: str) -> None:
        if not self._refused:  # once per outage
            logger.warning(message)
        self._refused = True
