"""Several jobs at once: the first failure stops the others, and so does an interrupt."""

import queue
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TypeAlias, TypeVar

from . import commands

T = TypeVar("T")
Ended: TypeAlias = tuple[str, T | None, BaseException | None]
STOP_SECONDS = 120.0
"""Limit for the end of a job. It stops its command within 15 s, then deletes its folders, which takes long on a busy disk."""


def run_together(jobs: Mapping[str, Callable[[], T]]) -> dict[str, T]:
    """Run jobs at the same time, each in a thread.

    Returns:
        The result of each.

    Raises:
        BaseException: the first error of a job. The commands of all others have ended by then.
    """
    ended: queue.SimpleQueue[Ended[T]] = queue.SimpleQueue()

    def work(name: str, job: Callable[[], T]) -> None:
        try:
            ended.put((name, job(), None))
        except BaseException as error:
            ended.put((name, None, error))

    threads = [threading.Thread(target=work, args=item, daemon=True) for item in jobs.items()]
    results: dict[str, T] = {}
    try:
        for thread in threads:
            thread.start()
        for _ in threads:
            name, result, error = _next(ended)
            if error is not None:
                raise error
            results[name] = result  # type: ignore[assignment]
    except BaseException:
        commands.stop_all()
        for thread in threads:
            if thread.is_alive():
                thread.join(timeout=STOP_SECONDS)
        if not any(thread.is_alive() for thread in threads):
            commands.allow_all()
        raise
    return results


def _next(ended: queue.SimpleQueue[Ended[T]]) -> Ended[T]:
    """Wait with a limit in a loop, because a signal to another thread does not wake this one."""
    while True:
        with suppress(queue.Empty):
            return ended.get(timeout=commands.POLL_SECONDS)
