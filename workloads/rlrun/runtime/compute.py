"""Computation beside an event loop, so that one large document does not make a thousand others wait.

Threads share the interpreter's lock: what runs here has to be small steps, or calls that give the lock up (tokenizers, numpy, zlib).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

SMALL = 1 << 14
"""Characters or bytes that cost less to work through than to hand to a thread: about 0.1 ms."""
_THREADS = 2
"""More would compete with the event loop for the interpreter's lock, and each may hold a large document."""
_POOL = ThreadPoolExecutor(_THREADS, thread_name_prefix="compute")
_T = TypeVar("_T")


async def compute(size: int, act: Callable[[], _T]) -> _T:
    """Result of `act`, whose work grows with `size`: computed here if that is small, else in a thread.

    `act` must change nothing that the caller would miss: where the caller is cancelled it runs on, and its result is dropped.
    """
    if size <= SMALL:
        return act()
    return await asyncio.get_running_loop().run_in_executor(_POOL, act)


async def stepwise(steps: Generator[None, None, _T]) -> _T:
    """Result of a generator whose work belongs into the event loop; all others have their turn at each of its `yield`s."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: _T = end.value
            return result
        await asyncio.sleep(0)
