"""Connections to an engine that ask for nothing are closed, and a flood of them does not keep out who asks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
import uvicorn

from rlrun.inference.guard import Connection

REQUEST = b"POST / HTTP/1.1\r\nHost: engine\r\nContent-Length: 4\r\n\r\n"
UNDER_WAY = asyncio.Event()
"""Set once the headers of a request have come."""
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def application(scope: Any, receive: Any, send: Any) -> None:
    """Answers once the body is there."""
    UNDER_WAY.set()
    while (await receive()).get("more_body"):
        pass
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


@asynccontextmanager
async def engine() -> AsyncIterator[int]:
    config = uvicorn.Config(application, host="127.0.0.1", port=0, http=Connection, lifespan="off", log_level="error")
    server = uvicorn.Server(config)
    config.load()
    server.lifespan = config.lifespan_class(config)
    await server.startup()
    try:
        yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        await server.shutdown()


async def answer(streams: Streams, *parts: bytes) -> bytes:
    """The status line after a request in parts; empty: the server closed the connection."""
    reader, writer = streams
    try:
        for part in parts:
            writer.write(part)
            await writer.drain()
        line = await asyncio.wait_for(reader.readline(), 60)
        if line:
            await reader.readuntil(b"ok")
    except ConnectionError:
        return b""
    return line


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Connection, "silent_seconds", 0.2)


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("begun", [b"", b"POST / HT", b"POST / HTTP/1.1\r\nHost: engine\r\n", b"\x16\x03\x01"])
async def test_a_connection_without_a_whole_request_is_closed(begun: bytes) -> None:
    async with engine() as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(begun)
        try:
            rest = await asyncio.wait_for(reader.read(), 60)
        except ConnectionResetError:
            rest = b""
        assert b"200" not in rest
        writer.close()
        assert Connection.silent == {}


@pytest.mark.usefixtures("short")
async def test_a_second_request_whose_headers_do_not_end_is_closed_too() -> None:
    async with engine() as port:
        streams = await asyncio.open_connection("127.0.0.1", port)
        assert b"200" in await answer(streams, REQUEST, b"body")
        assert await answer(streams, b"POST / HTTP/1.1\r\nHost: ") == b""


@pytest.mark.usefixtures("short")
async def test_a_request_may_take_longer_than_its_headers() -> None:
    async with engine() as port:
        streams = await asyncio.open_connection("127.0.0.1", port)
        streams[1].write(REQUEST)
        await asyncio.sleep(0.6)
        assert b"200" in await answer(streams, b"body")


async def test_silent_connections_give_way_to_later_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Connection, "most_silent", 5)
    async with engine() as port, AsyncExitStack() as stack:
        busy = await asyncio.open_connection("127.0.0.1", port)
        UNDER_WAY.clear()
        busy[1].write(REQUEST)
        await asyncio.wait_for(UNDER_WAY.wait(), 60)  # from then on it is not one of the silent
        flood = [await asyncio.open_connection("127.0.0.1", port) for _ in range(30)]
        for _, writer in flood:
            stack.callback(writer.close)
        later = await asyncio.open_connection("127.0.0.1", port)
        assert b"200" in await answer(later, REQUEST, b"body")
        assert b"200" in await answer(busy, b"body")
        assert len(Connection.silent) <= 5
        assert await answer(flood[0], REQUEST, b"body") == b""
        for _, writer in (busy, later):
            writer.close()
