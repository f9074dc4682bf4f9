"""Background writer of the orchestrator's part of checkpoints. Training continues while the volume refuses it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

from rlrun.orchestrator.aio.volume import in_thread
from rlrun.orchestrator.trainer.client import TrainerGoneError
from rlrun.protocol.files.volume_faults import RefusedError, Volume, retry_pauses

Part = tuple[int, Callable[[], None]]
"""A step and the function that writes its part."""


class PartWriter:
    """Writer of one part after the other. A refused part is retried until a newer checkpoint needs its part.

    Args:
        volume: volume for the parts.
        written: callback with the step whose part is durable.
    """

    def __init__(self, volume: Volume, written: Callable[[int], Awaitable[None]]) -> None:
        self._volume, self._written = volume, written
        self._parts: asyncio.Queue[Part] = asyncio.Queue()

    def put(self, step: int, write: Callable[[], None]) -> None:
        """Queue the part of `step`; `write` makes it durable."""
        self._parts.put_nowait((step, write))

    async def run(self) -> None:
        """Write until cancelled."""
        while True:
            step, write = await self._parts.get()
            if await self._write(f"save the orchestrator's part of the checkpoint of step {step}", write):
                with suppress(TrainerGoneError):
                    await self._written(step)

    async def _write(self, doing: str, write: Callable[[], None]) -> bool:
        for pause in retry_pauses():
            try:
                await in_thread(lambda: self._volume.attempt(doing, write, blocks=False))
            except RefusedError:
                if not self._parts.empty():
                    break
                await asyncio.sleep(pause)
            else:
                return True
        self._volume.accept(doing)
        return False
