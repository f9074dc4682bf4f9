"""Blocking calls on the volume, run in threads so that the event loop never waits for a hanging thread.

Each call has its own daemon thread. A volume that does not answer therefore blocks neither other work, such as the
renewal of the Lease, nor the end of the process.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from loguru import logger

from rlrun.protocol.files.volume_faults import RefusedError, Trouble, Volume, retry_pauses

_T = TypeVar("_T")


async def in_thread(act: Callable[[], _T]) -> _T:
    """Run `act` in a thread and return its result. After a cancellation the thread continues."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[_T] = loop.create_future()

    def set_outcome(result: _T | None, error: BaseException | None) -> None:
        if done.done():
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result, error = None, None
        try:
            result = act()
        except BaseException as raised:
            error = raised
        with suppress(RuntimeError):  # the loop is closed, so no task waits for the result
            loop.call_soon_threadsafe(set_outcome, result, error)

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
