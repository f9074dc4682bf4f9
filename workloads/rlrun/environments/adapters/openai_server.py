"""The policy as an OpenAI-compatible server on loopback, for programs that are written for OpenAI's client.

Every episode has a path of its own that nobody can guess, `http://127.0.0.1:PORT/episodes/<id>/v1`, which is gone when the episode is
over. A request becomes one call of the episode's `ModelClient`, so tokens, log-probabilities and versions are recorded as for any
environment. Requests of one episode are answered one after the other.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from aiohttp import web

from rlrun.environments.adapters.openai_api import (
    MODEL,
    Asked,
    RequestError,
    make_chunks,
    make_completion,
    read_request,
)
from rlrun.environments.protocol import Message, ModelClient, Reply
from rlrun.runtime.site import Site

MAX_BODY_BYTES = 64 * 1024 * 1024
MAX_SILENT = 20_000
"""Connections of programs that think: twice the episodes that a large run plays at once."""


@dataclass(frozen=True)
class Endpoint:
    """Address of the policy for a program, as OpenAI's client wants it."""

    base_url: str
    api_key: str
    model: str = MODEL

    def variables(self) -> dict[str, str]:
        """The same as environment variables; OpenAI's client reads the first two itself."""
        return {
            "OPENAI_BASE_URL": self.base_url,
            "OPENAI_API_KEY": self.api_key,
            "OPENAI_MODEL": self.model,
            "NO_PROXY": "127.0.0.1",
            "no_proxy": "127.0.0.1",
        }


class Served:
    """One episode's side of the server."""

    def __init__(self, model: ModelClient, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.messages: list[Message] = []
        """The latest conversation, with the reply."""
        self.replies = 0
        self.truncated = False
        """True if a reply was cut by a token limit."""
        self.overflowed = False
        """True if a request was refused because the conversation no longer fits."""
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Raises what the model client raised: the episode cannot go on."""
        self._model, self._lock = model, asyncio.Lock()
        self._asking: set[asyncio.Task[tuple[Reply, int]]] = set()
        self._over = False

    async def ask(self, asked: Asked) -> tuple[Reply, int]:
        """A reply and its number; cancelled when the program goes away or the episode is over.

        Raises:
            RequestError: there is none.
        """
        if self._over:
            raise RequestError("the episode is over", code="episode_over", status=404)
        task = asyncio.ensure_future(self._ask(asked))
        self._asking.add(task)
        try:
            return await task
        except asyncio.CancelledError:
            if self._over:
                raise RequestError("the episode is over", code="episode_over", status=404) from None
            task.cancel()
            raise
        finally:
            self._asking.discard(task)

    async def _ask(self, asked: Asked) -> tuple[Reply, int]:
        async with self._lock:
            try:
                reply = await self._model.complete(
                    asked.messages, max_tokens=asked.max_tokens, stop=asked.stop, tools=asked.tools
                )
            except Exception as error:
                if not self.failed.done():
                    self.failed.set_exception(error)
                raise RequestError(f"the model failed: {error}", status=503) from error
            self.truncated = self.truncated or reply.truncated
            if reply.truncated and not reply.completion_tokens:
                self.overflowed = True
                raise RequestError(
                    f"the conversation has {reply.prompt_tokens} tokens, which leaves no room for a reply",
                    "messages",
                    "context_length_exceeded",
                )
            self.messages = [*asked.messages, reply.message]
            self.replies += 1
            return reply, self.replies

    def end(self) -> None:
        """Answer nothing any more."""
        self._over = True
        for task in self._asking:
            task.cancel()
        if self.failed.done():
            self.failed.exception()  # seen
        else:
            self.failed.cancel()


class ChatServer:
    """Serves the episodes that are open; `start` first."""

    def __init__(self) -> None:
        self._served: dict[str, Served] = {}
        self._site: Site | None = None
        self._port = 0

    async def start(self) -> None:
        """Listen on a free port of loopback."""
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[_openai_errors])
        app.router.add_post("/episodes/{episode}/v1/chat/completions", self._chat)
        app.router.add_get("/episodes/{episode}/v1/models", self._models)
        # A program that goes away takes its request along, so that no engine works for nobody.
        self._site = Site(app, most_silent=MAX_SILENT, handler_cancellation=True, shutdown_timeout=0)
        await self._site.start("127.0.0.1", 0)
        self._port = self._site.port

    async def close(self) -> None:
        """Stop listening."""
        if self._site is not None:
            await self._site.close()

    @asynccontextmanager
    async def episode(self, model: ModelClient) -> AsyncIterator[Served]:
        """Serve one episode's model client inside the block."""
        key = secrets.token_urlsafe(24)
        served = Served(model, Endpoint(f"http://127.0.0.1:{self._port}/episodes/{key}/v1", key))
        self._served[key] = served
        try:
            yield served
        finally:
            del self._served[key]
            served.end()

    def _find(self, request: web.Request) -> Served:
        served = self._served.get(request.match_info["episode"])
        if served is None:
            raise RequestError("there is no such episode, or it is over", code="episode_over", status=404)
        return served

    async def _models(self, request: web.Request) -> web.Response:
        self._find(request)
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "rlrun"}
        return web.json_response({"object": "list", "data": [model]})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        served = self._find(request)
        try:
            body = json.loads(await request.read())
        except (ValueError, RecursionError):
            raise RequestError("the body is not JSON, or is nested too deeply") from None
        asked = read_request(body)
        reply, number = await served.ask(asked)
        if not asked.stream:
            return web.json_response(make_completion(asked, reply, number))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(request)
        for event in make_chunks(asked, reply, number):
            await response.write(event.encode())
        await response.write_eof()
        return response


@web.middleware
async def _openai_errors(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Errors as OpenAI's objects, also those of the server itself."""
    try:
        return await handler(request)
    except RequestError as error:
        return web.json_response(error.document(), status=error.status)
    except web.HTTPException as error:
        refused = RequestError(
            f"{request.method} {request.path} is not served: {error.reason}; ask for POST .../v1/chat/completions",
            status=error.status,
        )
        return web.json_response(refused.document(), status=error.status)
