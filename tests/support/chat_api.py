"""A stand-in for any server with OpenAI's chat API: plain JSON without token ids, log-probs and our own routes.

As a process: `python -m tests.support.chat_api PORT` answers each prompt backwards, which the environment reverse-text
expects.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

Answer = Callable[[web.Request, dict[str, Any]], Awaitable[web.StreamResponse]]


def completion(text: str | None, finish: str = "stop", **message: Any) -> dict[str, Any]:
    """Return a chat completion."""
    choice = {"index": 0, "message": {"role": "assistant", "content": text, **message}, "finish_reason": finish}
    usage = {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8}
    return {"id": "c", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice], "usage": usage}


async def backwards(_: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """Return the text between the prompt's marks backwards."""
    text = body["messages"][-1]["content"]
    return web.json_response(completion(text.strip("<>")[::-1]))


@dataclass
class ChatApi:
    """One server.

    Attributes:
        models: listed models, or None without such a route.
        key: required bearer token; empty: none.
        answers: answers to requests in their order; the last one for all later requests.
    """

    models: list[str] | None = field(default_factory=lambda: ["m"])
    key: str = ""
    answers: list[Answer] = field(default_factory=lambda: [backwards])
    asked: list[dict[str, Any]] = field(default_factory=list)
    """Bodies of all requests."""
    headers: list[dict[str, str]] = field(default_factory=list)
    url: str = ""

    async def _models(self, request: web.Request) -> web.StreamResponse:
        if (refused := self._refused(request)) is not None:
            return refused
        if self.models is None:
            return web.json_response({"detail": "Not Found"}, status=404)
        return web.json_response({"object": "list", "data": [{"id": one, "object": "model"} for one in self.models]})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        self.headers.append(dict(request.headers))
        if (refused := self._refused(request)) is not None:
            return refused
        body = json.loads(await request.read())
        self.asked.append(body)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        return await answer(request, body)

    def _refused(self, request: web.Request) -> web.StreamResponse | None:
        given = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if not self.key or given == self.key:
            return None
        said = {"error": {"message": f"Incorrect API key provided: {given}.", "code": "invalid_api_key"}}
        return web.json_response(said, status=401)

    @asynccontextmanager
    async def running(self, port: int = 0) -> AsyncIterator[ChatApi]:
        """Serve on a port of this machine; 0: a free one."""
        app = web.Application()
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/chat/completions", self._chat)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", port)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        try:
            yield self
        finally:
            await runner.cleanup()


def status(code: int, message: str = "no", **headers: str) -> Answer:
    """Return an error in OpenAI's form."""

    async def answer(_: web.Request, __: dict[str, Any]) -> web.StreamResponse:
        return web.json_response({"error": {"message": message}}, status=code, headers=headers)

    return answer


def text(content: str, content_type: str = "application/json") -> Answer:
    """Return a text as the whole answer, with status 200."""

    async def answer(_: web.Request, __: dict[str, Any]) -> web.StreamResponse:
        return web.Response(text=content, content_type=content_type)

    return answer


async def cut(request: web.Request, _: dict[str, Any]) -> web.StreamResponse:
    """Send an answer whose connection breaks in the middle."""
    response = web.StreamResponse(headers={"Content-Type": "application/json", "Content-Length": "1000"})
    await response.prepare(request)
    await response.write(b'{"choices": [')
    assert request.transport is not None
    request.transport.abort()
    return response


async def never(_: web.Request, __: dict[str, Any]) -> web.StreamResponse:
    """Send no answer."""
    await asyncio.sleep(3600)
    raise AssertionError


async def _serve(port: int) -> None:
    async with ChatApi().running(port) as api:
        print(api.url, flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_serve(int(sys.argv[1])))
