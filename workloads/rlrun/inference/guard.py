"""Access control by route. Pure ASGI, the outermost middleware, an allowlist: what is not named here does not exist.

vLLM's own key guards some prefixes only, and a later vLLM may add routes that change the engine; so exact paths are
allowed, compared with the very string that the router matches. A trailing or double slash, an encoded or upper-case
letter, `..` or another method is a different entry, hence refused.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from rlrun.protocol.messages.api_key import calling_guest
from rlrun.protocol.messages.endpoints import (
    ENGINE_GENERATE,
    ENGINE_GENERATE_PACKED,
    ENGINE_HEALTH,
    ENGINE_METRICS,
    ENGINE_PARSE,
    ENGINE_READY,
    ENGINE_RECEIVE_WEIGHTS,
    ENGINE_RELOAD_WEIGHTS,
    ENGINE_SLEEP,
    ENGINE_STATUS,
    ENGINE_UPDATE_WEIGHTS,
)

Event = MutableMapping[str, Any]
"""A request, or an event of one, as ASGI has them."""
Scope = Event
Receive = Callable[[], Awaitable[Event]]
Send = Callable[[Event], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

READ = frozenset({"GET", "HEAD"})
POST = frozenset({"POST"})

PUBLIC: dict[str, frozenset[str]] = {ENGINE_HEALTH: READ, ENGINE_READY: READ, ENGINE_METRICS: READ}
"""Probes and the metrics scraper carry no key."""

KEYED: dict[str, frozenset[str]] = {
    ENGINE_GENERATE: POST,
    ENGINE_GENERATE_PACKED: POST,
    ENGINE_STATUS: READ,
    ENGINE_UPDATE_WEIGHTS: POST,
    ENGINE_RELOAD_WEIGHTS: POST,
    ENGINE_RECEIVE_WEIGHTS: POST,
    ENGINE_SLEEP: POST,
    "/v1/models": READ,
    "/v1/completions": POST,
    "/v1/completions/render": POST,
    "/v1/completions/derender": POST,
    "/v1/chat/completions": POST,
    "/v1/chat/completions/batch": POST,
    "/v1/chat/completions/render": POST,
    ENGINE_PARSE: POST,
    "/v1/messages": POST,
    "/v1/messages/count_tokens": POST,
    "/v1/messages/render": POST,
    "/v1/responses": POST,
    "/v1/responses/render": POST,
    "/tokenize": POST,
    "/detokenize": POST,
    "/version": READ,
    "/load": READ,
    "/ping": READ | POST,
}
"""Routes that answer, and change nothing but through `/rlrun`. Refused on purpose, key or not: `load_lora_adapter`,
`/inference/v1/abort_requests` and `/v1/responses/{id}/cancel` (they end other callers' work), `/invocations` (a second
door to every route), WebSockets, and everything that vLLM adds in development mode."""

GUESTS = frozenset({ENGINE_GENERATE_PACKED, ENGINE_PARSE, ENGINE_STATUS, ENGINE_UPDATE_WEIGHTS})
"""Keyed routes that a guest's key opens. The handlers that sample and load see to it that adapter and folder are the guest's own; parsing
has no state, and the status shows the version that was handed over last, of whichever run."""
GUEST = "rlrun.guest"
"""Entry of a request's scope: the guest that asks; absent for the run itself."""


class Guard:
    """ASGI middleware: 401 for a known route without the key, 403 for every other one and for a guest's key where it opens nothing."""

    def __init__(self, app: App, api_key: str) -> None:
        self.app, self._api_key = app, api_key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
        elif scope["type"] == "http":
            refusal = self._refusal(scope)
            if refusal is None:
                await self.app(scope, receive, send)
            else:
                await answer_unread(send, *refusal)
        elif scope["type"] == "websocket":
            # Closing before accepting makes the server answer 403.
            await send({"type": "websocket.close", "code": 1008})

    def _refusal(self, scope: Scope) -> tuple[int, str] | None:
        path, method = scope["path"], scope["method"]
        if method in PUBLIC.get(path, ()):
            return None
        if method not in KEYED.get(path, ()):
            return 403, "this route is not served"
        who = calling_guest(
            [value for name, value in scope["headers"] if name.lower() == b"authorization"], self._api_key
        )
        if who is None:
            return 401, "the run's API key is needed: send 'Authorization: Bearer <key>'"
        if who:
            if path not in GUESTS:
                return 403, f"the key of run {who} does not open this route"
            scope[GUEST] = who
        return None


async def answer_unread(send: Send, status: int, message: str) -> None:
    """Refuse a request whose body was not read."""
    body = json.dumps({"error": {"code": status, "message": message}}).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        # The request's body was not read: the connection cannot be used again.
        (b"connection", b"close"),
    ]
    if status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
