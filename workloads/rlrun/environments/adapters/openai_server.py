"""OpenAI-compatible server on the loopback interface, through which programs use the policy.

Every episode has its own secret path, `http://127.0.0.1:PORT/episodes/<id>/v1`, which is removed when the episode ends. Each request
becomes one call of the episode's `ModelClient`, so tokens, log-probabilities and versions are recorded as for any other environment.
Requests of one episode are answered one after the other.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

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
from rlrun.runtime.http_site import Site

if TYPE_CHECKING:
    pass


MAX_BODY_BYTES = 64 * 1024 * 1024


MAX_SILENT = 20_000
"""Largest number of connections without traffic: twice the number of episodes that a large run plays at once."""


@dataclass(frozen=True)
class Endpoint:
    """Address of the policy for a program with OpenAI's client."""

    base_url: str
    api_key: str
    model: str = MODEL

    def variables(self) -> dict[str, str]:
        """Return the address as environment variables; OpenAI's client reads the first two itself."""
        return {
            "OPENAI_BASE_URL": self.base_url,
            "OPENAI_API_KEY": self.api_key,
            "OPENAI_MODEL": self.model,
            "NO_PROXY": "127.0.0.1",
            "no_proxy": "127.0.0.1",
        }


class Served:
    """State of one episode on the server."""

    def __init__(self, model: ModelClient, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.messages: list[Message] = []
        """Conversation of the latest request, with its reply."""
        self.replies = 0
        self.truncated = False
        """Whether a token limit cut a reply."""
        self.overflowed = False
        """Whether a request was rejected because the conversation is too long."""
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Future with the exception of the model client, which ends the episode."""
        self._model, self._lock = model, asyncio.Lock()
        self._asking: set[asyncio.Task[tuple[Reply, int]]] = set()
        self._over = False

    async def request_reply(self, asked: Asked) -> tuple[Reply, int]:
        """Return a reply and its number. The call is canceled if the program disconnects or the episode ends.

        Raises:
            RequestError: the episode is over, the model failed, or the conversation is too long.
        """
        if self._over:
            raise RequestError("the episode is over", code="episode_over", status=404)
        task = asyncio.ensure_future(self._call_model(asked))
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

    async def _call_model(self, asked: Asked) -> tuple[Reply, int]:
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
        """Cancel all requests and reject new ones."""
        self._over = True
        for task in self._asking:
            task.cancel()
        if self.failed.done():
            self.failed.exception()  # marks the exception as retrieved, so that asyncio does not log it
        else:
            self.failed.cancel()


class ChatServer:
    """Server for all running episodes. Call `start` before `episode`."""

    def __init__(self) -> None:
        self._served: dict[str, Served] = {}
        self._site: Site | None = None
        self._port = 0

    async def start(self) -> None:
        """Listen on a free port of the loopback interface."""
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[_openai_errors])
        app.router.add_post("/episodes/{episode}/v1/chat/completions", self._complete_chat)
        app.router.add_get("/episodes/{episode}/v1/models", self._list_models)
        # If a program disconnects, its request is canceled, so that no engine generates a reply that will not be read.
        self._site = Site(app, most_silent=MAX_SILENT, handler_cancellation=True, shutdown_timeout=0)
        await self._site.start("127.0.0.1", 0)
        self._port = self._site.port

    async def close(self) -> None:
        """Stop listening."""
        if self._site is not None:
            await self._site.close()

    @asynccontextmanager
    async def episode(self, model: ModelClient) -> AsyncIterator[Served]:
        """Serve the model client of one episode until the end of the `with` block."""
        key = secrets.token_urlsafe(24)
        served = Served(model, Endpoint(f"http://127.0.0.1:{self._port}/episodes/{key}/v1", key))
        self._served[key] = served
        try:
            yield served
        finally:
            del self._served[key]
            served.end()

    def _find_episode(self, request: web.Request) -> Served:
        served = self._served.get(request.match_info["episode"])
        if served is None:
            raise RequestError("the episode does not exist, or is over", code="episode_over", status=404)
        return served

    async def _list_models(self, request: web.Request) -> web.Response:
        self._find_episode(request)
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "rlrun"}
        return web.json_response({"object": "list", "data": [model]})

    async def _complete_chat(self, request: web.Request) -> web.StreamResponse:
        served = self._find_episode(request)
        try:
            body = json.loads(await request.read())
        except (ValueError, RecursionError):
            raise RequestError("the body is not JSON, or is nested too deeply") from None
        asked = read_request(body)
        reply, number = await served.request_reply(asked)
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
    """Return all errors in OpenAI's format, including errors of the server itself."""
    try:
        return await handler(request)
    except RequestError as error:
        return web.json_response(error.document(), status=error.status)
    except web.HTTPException as error:
        refused = RequestError(
            f"{request.method} {request.path} is not supported: {error.reason}; use POST .../v1/chat/completions",
            status=error.status,
        )
        return web.json_response(refused.document(), status=error.status)
