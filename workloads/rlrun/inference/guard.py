"""Access control by route: an ASGI middleware outside of all others, with an allowlist.

vLLM's own key protects only some prefixes, and a later vLLM may add routes that change the engine. Therefore unlisted routes are refused,
and only exact paths are allowed, compared with the same string that the router matches. A trailing or double slash, an encoded or
upper-case letter, `..` or another method is a different entry and is refused.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

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
    calling_guest,
)

Event = MutableMapping[str, Any]
"""ASGI scope of a request, or an ASGI event."""
Scope = Event
Receive = Callable[[], Awaitable[Event]]
Send = Callable[[Event], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

READ = frozenset({"GET", "HEAD"})
POST = frozenset({"POST"})

PUBLIC: dict[str, frozenset[str]] = {ENGINE_HEALTH: READ, ENGINE_READY: READ, ENGINE_METRICS: READ}
"""Routes without a key, for probes and the metrics scraper."""

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
"""Routes that only read or compute, plus those below `/rlrun`, which can change state. Refused on purpose, with or without a key:
`load_lora_adapter`, `/inference/v1/abort_requests` and `/v1/responses/{id}/cancel` (they abort requests of other callers), `/invocations`
(an alias of every route), WebSockets, and everything that vLLM adds in development mode."""

GUESTS = frozenset({ENGINE_GENERATE_PACKED, ENGINE_PARSE, ENGINE_STATUS, ENGINE_UPDATE_WEIGHTS})
"""Keyed routes that accept a guest's key. The handlers for sampling and loading check that adapter and folder belong to the guest. Parsing
has no state, and the status shows the last loaded version of any run."""
GUEST = "rlrun.guest"
"""Key of a request's scope for the name of the calling guest; absent if the run itself calls."""


class Guard:
    """ASGI middleware: 401 for a listed route without a key; 403 for other routes, and for a guest's key on a route closed to guests."""

    def __init__(self, app: App, api_key: str) -> None:
        self.app, self._api_key = app, api_key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
        elif scope["type"] == "http":
            refusal = self._find_refusal(scope)
            if refusal is None:
                await self.app(scope, receive, send)
            else:
                await answer_unread(send, *refusal)
        elif scope["type"] == "websocket":
            # The server answers 403 if the socket is closed before it is accepted.
            await send({"type": "websocket.close", "code": 1008})

    def _find_refusal(self, scope: Scope) -> tuple[int, str] | None:
        path, method = scope["path"], scope["method"]
        if method in PUBLIC.get(path, ()):
            return None
        if method not in KEYED.get(path, ()):
            return 403, "this route is not served"
        who = calling_guest(
            [value for name, value in scope["headers"] if name.lower() == b"authorization"], self._api_key
        )
        if who is None:
            return 401, "the API key of the run is missing or wrong; send the header 'Authorization: Bearer <key>'"
        if who:
            if path not in GUESTS:
                return 403, f"the key of run {who} is not allowed on this route"
            scope[GUEST] = who
        return None


async def answer_unread(send: Send, status: int, message: str) -> None:
    """Refuse a request without reading its body."""
    body = json.dumps({"error": {"code": status, "message": message}}).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        # The body was not read, so the connection cannot be reused.
        (b"connection", b"close"),
    ]
    if status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
