"""Work without an end of its own beside the role's main work."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager

Background = Callable[[Coroutine[object, object, None]], object]
"""Runs what has no end of its own."""


@asynccontextmanager
async def background_tasks() -> AsyncIterator[Background]:
    """Run what has no end of its own, until the block ends; an error in it ends the block."""
    async with asyncio.TaskGroup() as group:
        tasks: list[asyncio.Task[None]] = []

        def start(work: Coroutine[object, object, None]) -> None:
            tasks.append(group.create_task(work))

        yield start
        for task in tasks:
            task.cancel()
