"""Authentication guard in front of an application that accepts everything."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rlrun.inference.guard import GUEST, GUESTS, KEYED, PUBLIC, Guard
from rlrun.protocol.messages.endpoints import guest_key, guest_proof, key_digest

KEY = b"the-key-of-this-run"


async def ask(
    path: str,
    method: str = "GET",
    headers: list[tuple[bytes, bytes]] | None = None,
    seen: list[str | None] | None = None,
) -> int:
    """Return the status of one request; 200 if it passed, with its guest in `seen`."""
    sent: list[dict[str, Any]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if seen is not None:
            seen.append(scope.get(GUEST))
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        raise AssertionError("the guard reads no body")

    scope = {"type": "http", "path": path, "method": method, "headers": headers or []}
    await Guard(app, KEY.decode())(scope, receive, send)
    if sent[0]["status"] != 200:
        assert json.loads(sent[1]["body"])["error"]["code"] == sent[0]["status"]
    return int(sent[0]["status"])


def bearer(key: bytes) -> list[tuple[bytes, bytes]]:
    return [(b"authorization", b"Bearer " + key)]


@pytest.mark.parametrize("path", PUBLIC)
async def test_public_routes_need_no_key_and_only_read(path: str) -> None:
    assert await ask(path) == await ask(path, "HEAD") == 200
    assert await ask(path, "POST", bearer(KEY)) == 403


@pytest.mark.parametrize("path", KEYED)
async def test_other_routes_need_the_key(path: str) -> None:
    for method in KEYED[path]:
        assert await ask(path, method, bearer(KEY)) == 200
        for wrong in (None, bearer(b""), bearer(KEY + b"x"), bearer(KEY[:-1]), [(b"authorization", KEY)]):
            assert await ask(path, method, wrong) == 401
        assert await ask(path, method, bearer(KEY) + bearer(b"other")) == 401, "two headers are no key"
        assert await ask(path, method, [(b"authorization", b"Basic " + KEY)]) == 401
    assert await ask(path, "DELETE", bearer(KEY)) == 403


@pytest.mark.parametrize("path", KEYED)
async def test_guest_key_opens_only_guest_routes(path: str) -> None:
    key = bearer(guest_key("a-guest", "own", guest_proof(KEY.decode(), "a-guest", key_digest("own"))).encode())
    for method in KEYED[path]:
        seen: list[str | None] = []
        assert await ask(path, method, key, seen) == (200 if path in GUESTS else 403)
        assert seen == (["a-guest"] if path in GUESTS else [])
        assert await ask(path, method, bearer(KEY), seen) == 200
        assert seen[-1] is None, "the run itself is no guest"


@pytest.mark.parametrize(
    "path",
    ["", "/", "/pause", "/collective_rpc", "//health", "/health/", "/Health", "/health%2e", "/v1/load_lora_adapter",
     "/health/../pause", "/rlrun/update_weights/", "/v1/responses/x/cancel", "/inference/v1/abort_requests"],
)  # fmt: skip
async def test_unlisted_route_is_refused_even_with_key(path: str) -> None:
    for method in ("GET", "POST", "HEAD", "OPTIONS"):
        assert await ask(path, method) == await ask(path, method, bearer(KEY)) == 403


async def test_websockets_are_closed_and_lifespan_passes() -> None:
    sent: list[Any] = []
    seen: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope["type"])

    async def send(message: Any) -> None:
        sent.append(message["type"])

    async def receive() -> Any:
        return {}

    guard = Guard(app, KEY.decode())
    await guard({"type": "websocket", "path": "/health", "headers": bearer(KEY)}, receive, send)
    await guard({"type": "lifespan"}, receive, send)
    assert sent == ["websocket.close"]
    assert seen == ["lifespan"]
