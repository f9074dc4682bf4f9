"""The event loop's side of the volume: blocking calls run in threads, and the loop never waits for a thread that hangs.

The threads are daemons, one for each call: a volume that does not answer holds neither other work, such as the renewal of the Lease, nor
the end of the process.
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
    """Result of `act`; one that is cancelled goes on for itself."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[_T] = loop.create_future()

    def tell(result: _T | None, error: BaseException | None) -> None:
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
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(tell, result, error)

    threading.Thread(target=run, name="files", daemon=True).start()
    return await done


async def retry_until_done(volume: Volume, doing: str, act: Callable[[], _T]) -> _T:
    """Result of `act`, as soon as the volume takes it; see `Volume.attempt`."""
    for pause in retry_pauses():
        with suppress(RefusedError):
            return await in_thread(lambda: volume.attempt(doing, act))
        await asyncio.sleep(pause)
    raise AssertionError


async def clean_up(doing: str, act: Callable[[], _T]) -> _T | None:
    """Result of `act`, which deletes what is no longer needed; None if the volume fails: the next call deletes it as well."""
    try:
        return await in_thread(act)
    except OSError as error:
        logger.warning(f"cannot {doing} now: {error}")
        return None


def worst_trouble(*told: Trouble | None) -> Trouble | None:
    """Trouble to report: what the run waits for comes first."""
    troubles = [trouble for trouble in told if trouble is not None]
    return min(troubles, key=lambda trouble: not trouble.blocks, default=None)
