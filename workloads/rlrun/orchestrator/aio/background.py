"""Background tasks that run until the role's main work ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager

Background = Callable[[Coroutine[object, object, None]], object]
"""Function that starts an endless coroutine."""


@asynccontextmanager
async def background_tasks() -> AsyncIterator[Background]:
    """Provide a function that starts endless coroutines. They are canceled at the end of the block; an error in one
    ends the block.
    """
    async with asyncio.TaskGroup() as group:
        tasks: list[asyncio.Task[None]] = []

        def start(work: Coroutine[object, object, None]) -> None:
            tasks.append(group.create_task(work))

        yield start
        for task in tasks:
            task.cancel()
