"""Computation outside of the event loop, so that one large document does not delay a thousand others.

Threads share the interpreter's lock: work here must consist of small steps, or of calls that release the lock (tokenizers, numpy, zlib).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

SMALL = 1 << 14
"""Characters or bytes whose processing is cheaper than passing them to a thread: about 0.1 ms."""
_THREADS = 2
"""Number of threads. More would compete with the event loop for the interpreter's lock, and each may hold a large document."""
_POOL = ThreadPoolExecutor(_THREADS, thread_name_prefix="compute")
_T = TypeVar("_T")


async def compute_without_blocking(size: int, act: Callable[[], _T]) -> _T:
    """Return the result of `act`, whose work grows with `size`: computed here if that is small, else in a thread.

    If the caller is cancelled, `act` continues and its result is dropped. Therefore it must not have side effects.
    """
    if size <= SMALL:
        return act()
    return await asyncio.get_running_loop().run_in_executor(_POOL, act)


async def run_stepwise(steps: Generator[None, None, _T]) -> _T:
    """Return the result of a generator that runs in the event loop; other tasks run at each of its `yield`s."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: _T = end.value
            return result
        await asyncio.sleep(0)
