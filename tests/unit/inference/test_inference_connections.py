"""Connections to an engine: idle ones are closed, and a flood of them does not block requests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
import uvicorn

from rlrun.inference.http.connections import Connection

REQUEST = b"POST / HTTP/1.1\r\nHost: engine\r\nContent-Length: 4\r\n\r\n"
UNDER_WAY = asyncio.Event()
"""Set when the headers of a request have arrived."""
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def application(scope: Any, receive: Any, send: Any) -> None:
    """Respond after the body has arrived."""
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
    """Return the status line after a request sent in parts, or an empty value if the server closed the connection."""
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
async def test_incomplete_request_is_closed(begun: bytes) -> None:
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
async def test_second_request_with_endless_headers_is_closed() -> None:
    async with engine() as port:
        streams = await asyncio.open_connection("127.0.0.1", port)
        assert b"200" in await answer(streams, REQUEST, b"body")
        assert await answer(streams, b"POST / HTTP/1.1\r\nHost: ") == b""


@pytest.mark.usefixtures("short")
async def test_request_body_may_take_longer_than_header_limit() -> None:
    async with engine() as port:
        streams = await asyncio.open_connection("127.0.0.1", port)
        streams[1].write(REQUEST)
        await asyncio.sleep(0.6)
        assert b"200" in await answer(streams, b"body")


async def test_silent_connections_are_closed_for_new_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Connection, "most_silent", 5)
    async with engine() as port, AsyncExitStack() as stack:
        busy = await asyncio.open_connection("127.0.0.1", port)
        UNDER_WAY.clear()
        busy[1].write(REQUEST)
        await asyncio.wait_for(UNDER_WAY.wait(), 60)  # from now on the connection is not silent
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
