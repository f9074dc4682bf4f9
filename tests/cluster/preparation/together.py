"""Several jobs at once: the first failure stops the others, and so does an interrupt."""

import queue
import threading
from collections.abc import Callable, Mapping
from typing import TypeVar

from . import commands

T = TypeVar("T")
STOP_SECONDS = commands.GRACE_SECONDS + 5.0


def run_together(jobs: Mapping[str, Callable[[], T]]) -> dict[str, T]:
    """Run jobs at the same time, each in a thread.

    Returns:
        The result of each.

    Raises:
        BaseException: the first error of a job. The commands of all others have ended by then.
    """
    ended: queue.SimpleQueue[tuple[str, T | None, BaseException | None]] = queue.SimpleQueue()

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
            name, result, error = ended.get()
            if error is not None:
                raise error
            results[name] = result  # type: ignore[assignment]
    except BaseException:
        commands.stop_all()  # a thread that waits for a lock has no command: it ends with this process
        for thread in threads:
            if thread.is_alive():
                thread.join(timeout=STOP_SECONDS)
        if not any(thread.is_alive() for thread in threads):
            commands.allow_all()
        raise
    return results
