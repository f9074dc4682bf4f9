"""Load users' code as a run would, each piece in its own process, and report the pieces that cannot be loaded.

Environments, losses and advantages are users' code: they may exit, hang, crash or print without end. A command that imported them would
fail with them. Therefore the worker that plays rollouts loads them, within the same limits.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType
from typing import Literal

from rlrun.environments.process.life import Command, Life, Limits
from rlrun.environments.process.process_output import Log
from rlrun.environments.process.talk import StartError

AT_ONCE = 4
"""Processes that load at the same time. Each may hold a data set in memory."""


@dataclass(frozen=True)
class Refusal:
    """Failure of code to load."""

    message: str
    missing: bool
    """Whether only an import, the interpreter or data is missing, which the run's pods may have."""
    said: bool = True
    """Whether the code reported the error itself. Otherwise its process ended, or took too long."""


def check_subjects(
    subjects: Sequence[tuple[Command, Limits]], notice: Callable[[int, str], None] = lambda _index, _text: None
) -> list[Refusal | None]:
    """Load every subject and end its process with all descendants. Equal subjects share one process.

    Args:
        subjects: code to load.
        notice: function that gets the index of a subject and a sentence about its data.

    Returns:
        Refusal of each subject, or None if it can be loaded.

    Raises:
        KeyboardInterrupt: SIGINT, SIGTERM or SIGHUP arrived; all processes were ended.
    """
    if not subjects:
        return []
    with asyncio.Runner() as runner, _ended_by_signals(runner.get_loop()) as stopped:
        return runner.run(_check_subject(subjects, notice, stopped))


async def _check_subject(
    subjects: Sequence[tuple[Command, Limits]], notice: Callable[[int, str], None], stopped: asyncio.Event
) -> list[Refusal | None]:
    room = asyncio.Semaphore(AT_ONCE)
    first = [subjects.index(subject) for subject in subjects]

    async def load_subject(index: int, command: Command, limits: Limits) -> Refusal | None:
        async with room:
            life = Life(command, limits, Log(None))
            try:
                for text in (await life.start()).notices:
                    for equal in (other for other, leader in enumerate(first) if leader == index):
                        notice(equal, text)
            except StartError as error:
                return Refusal(str(error), error.missing, error.permanent)
            finally:
                life.end()
            return None

    unique = sorted(set(first))
    loading = asyncio.gather(*(load_subject(index, *subjects[index]) for index in unique))
    stopping = asyncio.ensure_future(stopped.wait())
    waiting: set[asyncio.Future[list[Refusal | None]] | asyncio.Future[Literal[True]]] = {loading, stopping}
    await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    if not loading.done():
        loading.cancel()
        with suppress(asyncio.CancelledError):
            await loading
        raise KeyboardInterrupt
    stopping.cancel()
    refusals = dict(zip(unique, loading.result(), strict=True))
    return [refusals[index] for index in first]


@contextmanager
def _ended_by_signals(loop: asyncio.AbstractEventLoop) -> Iterator[asyncio.Event]:
    """Set the event at SIGINT, SIGTERM and SIGHUP, and restore the previous handlers afterwards."""
    stopped = asyncio.Event()

    def on_signal(_number: int, _frame: FrameType | None) -> None:
        loop.call_soon_threadsafe(stopped.set)

    previous = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield stopped
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
