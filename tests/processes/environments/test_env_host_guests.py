"""Connections to the host of a container: the host keeps no objects after their end."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from rlrun.environments.process.host import _Guest, serve_connections
from rlrun.environments.process.isolated import IsolatedEnvironment
from rlrun.environments.process.life import Command, Life, Limits
from rlrun.environments.process.process_output import Log
from tests.support.programs import wait_for_async
from tests.support.waiting import UNREACHED_SECONDS

CONNECTIONS = 50
LIMITS = Limits(start_seconds=UNREACHED_SECONDS, memory_bytes=400 * 1024**2, hang_seconds=UNREACHED_SECONDS)


def count_kept(kind: type) -> int:
    """Return the number of referenced objects of a class."""
    gc.collect()
    return sum(isinstance(found, kind) for found in gc.get_objects())


@asynccontextmanager
async def serve_host(socket: Path, *, is_shared: bool) -> AsyncIterator[None]:
    stopped = asyncio.Event()
    serving = asyncio.create_task(serve_connections(socket, stopped, is_shared=is_shared))
    await wait_for_async(socket.exists)
    yield
    stopped.set()
    await serving


async def connect_and_close(socket: Path) -> None:
    reader, writer = await asyncio.open_unix_connection(str(socket))
    writer.close()
    while await reader.read(1024):
        pass


@pytest.mark.parametrize("is_shared", [False, True], ids=["own-container", "shared-refused"])
async def test_host_keeps_no_guest_after_its_connection(tmp_path: Path, is_shared: bool) -> None:
    """The shared host refuses these connections, because they come from a process of its own container."""
    async with serve_host(tmp_path / "socket", is_shared=is_shared):
        before = count_kept(_Guest)
        for _ in range(CONNECTIONS):
            await connect_and_close(tmp_path / "socket")
        await wait_for_async(lambda: count_kept(_Guest) <= before)


async def test_host_keeps_no_process_of_ended_environment(tmp_path: Path) -> None:
    async with serve_host(tmp_path / "socket", is_shared=False):
        before = count_kept(Life)
        for _ in range(3):
            environment = IsolatedEnvironment(
                "words", Command("reverse-text", {}), LIMITS, [Log(None)], tmp_path / "socket"
            )
            await environment.start()
            assert count_kept(Life) == before + 1
            environment.close()
            await wait_for_async(lambda: count_kept(Life) <= before)
