"""Engines behind real HTTP servers with all failures of a machine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Literal

from aiohttp import web
from aiohttp.typedefs import Handler
from orch_simulation import FakeEngine

from rlrun.inference.client.engine_client import EngineError
from rlrun.protocol.messages import endpoints

Mode = Literal["up", "hangs", "answers_500", "answers_nonsense"]


def truth(version: int) -> float:
    """Return the log-prob of every token that a version samples, which identifies the weights of a token."""
    return -(version + 1) / 1000


@dataclass
class Door:
    """One engine's server. `mode` changes the behavior of every route at once."""

    engine: FakeEngine
    mode: Mode = "up"
    load: dict[str, float] = field(default_factory=dict)
    """Metrics by name without `vllm:`; empty: the route does not exist."""
    asked: int = 0
    """Number of requests for tokens, regardless of their result."""
    ignored: int = 0
    """Number of health requests received during a hang."""
    url: str = ""
    _runner: web.AppRunner | None = None
    _port: int = 0

    async def open(self) -> None:
        """Listen; on the same port again after `close`."""
        app = web.Application(middlewares=[self._fail])
        app.router.add_post(endpoints.ENGINE_GENERATE, self._generate)
        app.router.add_post(endpoints.ENGINE_UPDATE_WEIGHTS, self._update)
        app.router.add_get(endpoints.ENGINE_STATUS, self._status)
        app.router.add_get(endpoints.ENGINE_METRICS, self._metrics)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self._port, reuse_address=True)
        await site.start()
        server = site._server
        assert isinstance(server, asyncio.Server)
        self._port = server.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self._port}"

    async def close(self) -> None:
        """Break all requests in flight without an answer, and stop listening."""
        if self._runner is not None:
            runner, self._runner = self._runner, None
            assert runner.server is not None
            for connection in runner.server.connections:
                if connection.transport is not None:
                    connection.transport.abort()
            self.mode = "up"
            await runner.cleanup()

    @web.middleware
    async def _fail(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path == endpoints.ENGINE_GENERATE:
            self.asked += 1
        self.ignored += self.mode == "hangs" and request.path == endpoints.ENGINE_STATUS
        await self._going()
        if self.mode == "answers_500" and request.path == endpoints.ENGINE_GENERATE:
            return web.json_response({"error": {"message": "CUDA error"}}, status=500)
        if self.mode == "answers_nonsense" and request.path == endpoints.ENGINE_GENERATE:
            return web.json_response({"choices": [{"index": "?"}] * 2})
        response = await handler(request)
        await self._going()  # it may have been suspended while it worked
        return response

    async def _going(self) -> None:
        while self.mode == "hangs":  # noqa: ASYNC110 (a test changes the mode with a plain assignment)
            await asyncio.sleep(0.005)

    async def _generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        sampling = body["sampling_params"]
        completions = await self.engine.generate(
            body["token_ids"], n=sampling["n"], max_tokens=sampling["max_tokens"], cache_salt=body.get("cache_salt")
        )
        choices = [
            {
                "index": index,
                "token_ids": c.token_ids,
                "logprobs": {
                    "content": [
                        {"token_id": token, "logprob": truth(version)}
                        for token, version in zip(c.token_ids, c.versions, strict=True)
                    ]
                },
                "weight_versions": [{"version": str(v), "start": i, "end": i + 1} for i, v in enumerate(c.versions)],
                "finish_reason": c.finish_reason,
            }
            for index, c in enumerate(completions)
        ]
        return web.json_response({"choices": choices})

    async def _update(self, request: web.Request) -> web.Response:
        body = await request.json()
        try:
            seconds = await self.engine.update_weights(body["path"], body["version"], force=body["force"])
        except EngineError as error:
            return web.json_response({"error": {"message": str(error)}}, status=error.status or 500)
        return web.json_response({"version": body["version"], "changed": True, "seconds": seconds, "model": None})

    async def _status(self, request: web.Request) -> web.Response:
        return web.json_response({"weight_version": self.engine.version, "engine_alive": True, "updating": False})

    async def _metrics(self, request: web.Request) -> web.Response:
        if not self.load:
            return web.Response(status=404)
        return web.Response(text="".join(f"vllm:{name}{{}} {value}\n" for name, value in self.load.items()))


@asynccontextmanager
async def open_doors(*engines: FakeEngine) -> AsyncIterator[list[Door]]:
    """Yield a server for each engine."""
    doors = [Door(engine) for engine in engines]
    try:
        for door in doors:
            await door.open()
        yield doors
    finally:
        for door in doors:
            await door.close()
