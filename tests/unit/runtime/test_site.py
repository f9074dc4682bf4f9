"""Limits on the cost that a client without a key can cause on a role's HTTP server."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import aiohttp
import pytest
from aiohttp import web

from rlrun.pod.rendezvous import PodServer
from rlrun.protocol.messages.endpoints import POD_JOIN, POD_READY, holds_key
from rlrun.runtime import http_site as site_module
from rlrun.runtime.http_site import ERRORS_PER_MINUTE, Few, Site
from rlrun.trainer.channel.run_channel import Channel

KEY = "sesame"
HOSTILE = [
    b"Bearer \xff\xfe",
    "Bearer ключ".encode(),
    b"Bearer " + b"x" * 7000,
    b"\xf0\x9f",
    b"Bearer sesame\xff",
    b"Bearer",
]


@pytest.mark.parametrize(
    ("values", "holds"),
    [
        (["Bearer sesame"], True),
        (["bearer sesame"], True),
        ([b"Bearer sesame"], True),
        (["Bearer  sesame"], True),
        ([], False),
        (["sesame"], False),
        (["Bearer"], False),
        (["Bearer "], False),
        (["Basic sesame"], False),
        (["Bearer sesame", "Bearer sesame"], False),
        (["Bearer sesam\udce9"], False),
        (["Bearer \ud800"], False),
        (["Bearer sesame\x00"], False),
    ],
)
def test_key_must_be_in_exactly_one_header(values: list[str | bytes], holds: bool) -> None:
    assert holds_key(values, KEY) is holds


def raw(port: int, request: bytes) -> bytes:
    """Return the answer to bytes that no library would send; the connection is closed afterwards."""
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        connection.sendall(request)
        answer = b""
        while part := connection.recv(65536):
            answer += part
    return answer


def asking(path: str, authorization: bytes) -> bytes:
    return b"GET %s HTTP/1.1\r\nHost: x\r\nConnection: close\r\nAuthorization: %s\r\n\r\n" % (
        path.encode(),
        authorization,
    )


def status(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


def test_trainer_channel_refuses_keys_of_any_bytes(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    channel = Channel.start_server(attempt=1, api_key=KEY, host="127.0.0.1", port=0, batch_path=lambda step: None)  # type: ignore[arg-type,return-value]
    try:
        for authorization in HOSTILE:
            assert status(raw(channel.port, asking("/rlrun/trainer/state", authorization))) in (400, 401)
        assert status(raw(channel.port, asking("/rlrun/trainer/nothing", b"Bearer " + KEY.encode()))) == 404
    finally:
        channel.close()
    assert "Traceback" not in caplog.text + capfd.readouterr().err


def test_trainer_pod_refuses_keys_of_any_bytes(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlrun.pod.rendezvous.POD_PORT", 0)
    server = PodServer("127.0.0.1", attempt=1, api_key=KEY, look=lambda: None)
    port = server._server.server_address[1]
    try:
        for authorization in HOSTILE:
            assert status(raw(port, asking(POD_JOIN, authorization))) == 401
        for query in ("", "?attempt=1", "?attempt=1&ordinal=x", "?attempt=1&ordinal=-1"):
            assert status(raw(port, asking(POD_JOIN + query, b"Bearer " + KEY.encode()))) in (400, 409)
        assert server.joined == set()
        assert status(raw(port, asking(POD_JOIN + "?attempt=1&ordinal=3", b"Bearer " + KEY.encode()))) == 200
        assert server.joined == {3}
    finally:
        server.close()
    assert "Traceback" not in capfd.readouterr().err


def test_connections_to_a_trainers_pod_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlrun.pod.rendezvous.POD_PORT", 0)
    monkeypatch.setattr("rlrun.pod.rendezvous.MAX_CONNECTIONS", 8)
    monkeypatch.setattr("rlrun.pod.rendezvous.REQUEST_SECONDS", 600.0)
    server = PodServer("127.0.0.1", attempt=1, api_key=KEY, look=lambda: None)
    port = server._server.server_address[1]
    silent = [socket.create_connection(("127.0.0.1", port), timeout=10) for _ in range(30)]
    try:
        assert status(raw(port, asking(POD_READY, b""))) == 200
        for connection in silent[:22]:
            assert connection.recv(1) == b"", "the oldest are closed"
        assert len(server._server._open) <= 8
    finally:
        for connection in silent:
            connection.close()
        server.close()


@asynccontextmanager
async def serving(most_silent: int = 512) -> AsyncIterator[tuple[Site, asyncio.Event]]:
    """Serve a site with a route that answers immediately, one that waits for the event, and one that fails."""
    go = asyncio.Event()

    async def plain(_: web.Request) -> web.Response:
        return web.Response(text="ok")

    async def waits(_: web.Request) -> web.Response:
        await go.wait()
        return web.Response(text="ok")

    async def fails(_: web.Request) -> web.Response:
        raise KeyError("a secret of the role")

    application = web.Application()
    application.add_routes([web.get("/", plain), web.get("/waits", waits), web.get("/fails", fails)])
    site = Site(application, most_silent=most_silent)
    await site.start("127.0.0.1", 0)
    try:
        yield site, go
    finally:
        await site.close()


async def closed(reader: asyncio.StreamReader) -> bool:
    """Return whether the server closes the connection."""
    try:
        return await asyncio.wait_for(reader.read(), 10) == b""
    except ConnectionResetError:
        return True


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(12_000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it did not happen in time")


async def test_idle_connections_are_closed_and_active_ones_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(site_module, "LOOK_SECONDS", 0.02)
    monkeypatch.setattr(site_module, "SILENT_SECONDS", 0.2)
    async with serving() as (site, go), aiohttp.ClientSession(f"http://127.0.0.1:{site.port}") as client:
        waiting = asyncio.ensure_future(client.get("/waits"))
        silent, dripping = [await asyncio.open_connection("127.0.0.1", site.port) for _ in range(2)]
        dripping[1].write(b"GET / HTTP/1.1\r\nHost: x\r\nX-A: ")

        async def drip() -> None:
            while True:
                dripping[1].write(b"a")
                await asyncio.sleep(0.02)

        drips = asyncio.ensure_future(drip())
        for reader, _ in (silent, dripping):
            assert await closed(reader)
        drips.cancel()
        await asyncio.sleep(0.3)  # the running request exceeds the limit for silent connections
        assert not waiting.done()
        go.set()
        assert (await asyncio.wait_for(waiting, 60)).status == 200
        for _, writer in (silent, dripping):
            writer.close()


async def test_oldest_silent_connections_are_closed_above_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(site_module, "LOOK_SECONDS", 0.02)
    async with serving(most_silent=4) as (site, _):
        server = site._runner.server
        assert server is not None
        opened = []
        for count in range(12):
            opened.append(await asyncio.open_connection("127.0.0.1", site.port))
            await until(
                lambda count=count: (
                    len(server.connections) == min(count + 1, 4) and len(site._silent_since) == min(count + 1, 4)
                )
            )  # type: ignore[misc]
        for reader, _writer in opened[:8]:
            assert await closed(reader)
        assert not any(reader.at_eof() for reader, _writer in opened[8:])
        for _reader, writer in opened:
            writer.close()
        await until(lambda: not server.connections and not site._silent_since and not site._busy)


async def test_route_error_is_hidden_from_client(caplog: pytest.LogCaptureFixture) -> None:
    async with (
        serving() as (site, _),
        aiohttp.ClientSession(f"http://127.0.0.1:{site.port}") as client,
        client.get("/fails") as response,
    ):
        assert response.status == 500
        assert "secret" not in await response.text()
    assert "a secret of the role" in caplog.text


async def test_invalid_http_requests_log_few_lines_without_traceback(caplog: pytest.LogCaptureFixture) -> None:
    async with serving() as (site, _):
        for _ in range(4 * ERRORS_PER_MINUTE):
            answer = await asyncio.to_thread(
                raw, site.port, b"GET / HTTP/1.1\r\nHost: x\r\nContent-Length: -\xff\r\n\r\n"
            )
            assert status(answer) == 400
    lines = [record for record in caplog.records if record.name == site_module.__name__]
    assert 0 < len(lines) <= 2 * ERRORS_PER_MINUTE  # the requests may fall into two minutes
    assert "Traceback" not in caplog.text


def test_log_limit_resets_after_a_minute() -> None:
    now = 0.0
    few = Few(lambda: now)
    record = logging.LogRecord("x", logging.ERROR, "x", 1, "m", (), None)
    assert [few.filter(record) for _ in range(ERRORS_PER_MINUTE + 1)] == [True] * ERRORS_PER_MINUTE + [False]
    now = 61.0
    assert few.filter(record)


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")
@pytest.mark.parametrize("name", ["[::1]", "127.0.0.1"])
async def test_ipv6_wildcard_listener_accepts_ipv4(name: str) -> None:
    async def answer(request: web.Request) -> web.Response:
        return web.Response(text="here")

    application = web.Application()
    application.router.add_get("/", answer)
    site = Site(application)
    await site.start("::", 0)
    try:
        async with aiohttp.ClientSession() as session, session.get(f"http://{name}:{site.port}/") as response:
            assert await response.text() == "here"
    finally:
        await site.close()
