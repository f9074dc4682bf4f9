"""Access to the volume from an event loop, and a background writer of files for people, such as metrics and traces.

Blocking calls run in threads, so that the event loop never waits for a hanging volume. Each call has its own daemon thread. A volume that
does not answer therefore blocks neither other work, such as the renewal of the Lease, nor the end of the process. The background writer is
best effort.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TypeVar

from loguru import logger

from rlrun.protocol.files.volume_faults import RefusedError, Trouble, Volume, retry_pauses

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
        self._thread = threading.Thread(target=self._write_queued, name="best-effort-writer", daemon=True)
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
            self._warn_once(f"{what} is not written: {_WAITING} files already wait for the volume")

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

    def _write_queued(self) -> None:
        while (job := self._jobs.get()) is not None:
            what, act, keep = job
            is_last = self._closing.is_set()
            if keep or time.monotonic() <= self._ends:
                while not self._try_write(what, act) and keep and not is_last:
                    is_last = self._closing.wait(RETRY_SECONDS)  # one last retry after the pause
            else:
                self._warn_once(f"{what} is not written: the run ends and the volume is slow")
            self._done += 1

    def _try_write(self, what: str, act: Callable[[], None]) -> bool:
        began = time.monotonic()
        try:
            act()
        except Exception as error:
            self._warn_once(f"cannot write {what}; the run continues without it: {error}")
            return False
        if self._refused:
            self._refused = False
            logger.info(f"{what} is written; the volume accepts files again, after {time.monotonic() - began:.1f} s")
        return True

    def _warn_once(self, message: str) -> None:
        if not self._refused:  # once per outage
            logger.warning(message)
        self._refused = True


_T = TypeVar("_T")


async def in_thread(act: Callable[[], _T]) -> _T:
    """Run `act` in a thread and return its result. After a cancellation the thread continues."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[_T] = loop.create_future()

    def settle(set_outcome: Callable[[], None]) -> None:
        if not done.done():
            set_outcome()

    def run() -> None:
        try:
            set_outcome: Callable[[], None] = partial(done.set_result, act())
        except BaseException as error:
            set_outcome = partial(done.set_exception, error)
        with suppress(RuntimeError):  # the loop is closed, so no task waits for the result
            loop.call_soon_threadsafe(settle, set_outcome)

    threading.Thread(target=run, name="files", daemon=True).start()
    return await done


async def retry_until_done(volume: Volume, doing: str, act: Callable[[], _T]) -> _T:
    """Return the result of `act` as soon as the volume accepts it; see `Volume.attempt`."""
    for pause in retry_pauses():
        with suppress(RefusedError):
            return await in_thread(lambda: volume.attempt(doing, act))
        await asyncio.sleep(pause)
    raise AssertionError


async def clean_up(doing: str, act: Callable[[], _T]) -> _T | None:
    """Return the result of `act`, which deletes unneeded files, or None if the volume fails. The next call deletes the
    rest.
    """
    try:
        return await in_thread(act)
    except OSError as error:
        logger.warning(f"cannot {doing} now: {error}")
        return None


def worst_trouble(*reported: Trouble | None) -> Trouble | None:
    """Return the problem to report: a problem that blocks the run has priority."""
    troubles = [trouble for trouble in reported if trouble is not None]
    return min(troubles, key=lambda trouble: not trouble.blocks, default=None)
