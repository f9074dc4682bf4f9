"""Limits of engine responses: bytes, tokens and field values follow the request."""

from __future__ import annotations

import json
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from rlrun.inference.client.completions import EngineError, expand_versions
from rlrun.inference.client.engine_client import ANSWER_BYTES, EngineClient
from rlrun.protocol.messages.endpoints import (
    ENGINE_GENERATE,
    ENGINE_GENERATE_PACKED,
    ENGINE_METRICS,
    ENGINE_PARSE,
    ENGINE_STATUS,
)
from rlrun.protocol.messages.packed_columns import FLOATS, INTEGERS, pack_document

BLOCK = b" " * (1 << 16)
BLOCKS = 4096
"""256 MB: more than the limit of any of these requests."""


@asynccontextmanager
async def engine(answer: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> AsyncIterator[EngineClient]:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        async with EngineClient(f"http://127.0.0.1:{runner.addresses[0][1]}", "key") as client:
            yield client
    finally:
        await runner.cleanup()


async def ask(client: EngineClient, **options: Any) -> Any:
    defaults = {"n": 1, "max_tokens": 4, "temperature": 1.0, "top_p": 1.0, "stop_token_ids": [2], "cache_salt": "3"}
    return await client.generate([5, 6], **(defaults | options))


CALLS: dict[str, Callable[[EngineClient], Awaitable[object]]] = {
    ENGINE_GENERATE_PACKED: ask,
    ENGINE_GENERATE: ask,
    ENGINE_PARSE: lambda client: client.parse([1, 2], []),
    ENGINE_STATUS: lambda client: client.status(),
    ENGINE_METRICS: lambda client: client.metrics(),
}


@pytest.mark.parametrize("path", CALLS)
@pytest.mark.parametrize("status", [200, 500])
async def test_endless_response_is_aborted_at_request_limit(path: str, status: int) -> None:
    sent = 0

    async def endless(request: web.Request) -> web.StreamResponse:
        nonlocal sent
        if path == ENGINE_GENERATE and request.path == ENGINE_GENERATE_PACKED:
            return web.Response(status=404)
        response = web.StreamResponse(status=status)
        await response.prepare(request)
        for _ in range(BLOCKS):
            await response.write(BLOCK)
            sent += len(BLOCK)
        return response

    async with engine(endless) as client:
        with pytest.raises(EngineError, match=r"returned more than the \d+ bytes that the request allows"):
            await CALLS[path](client)
    assert sent < BLOCKS * len(BLOCK)


async def test_long_requested_response_is_read() -> None:
    tokens = 60_000
    spans = [{"version": "3", "start": at, "end": at + 1} for at in range(tokens)]

    async def answer(_: web.Request) -> web.Response:
        head = {"model": "m", "choices": [{"tokens": tokens, "finish_reason": "stop", "weight_versions": spans}]}
        return web.Response(body=pack_document(head, [array(INTEGERS, [7]) * tokens, array(FLOATS, [-0.5]) * tokens]))

    async with engine(answer) as client:
        (completion,) = await ask(client, max_tokens=tokens)
        assert len(completion.token_ids) == tokens
        with pytest.raises(EngineError, match="returned 60000 tokens, but the request allows 30000"):
            await ask(client, max_tokens=tokens // 2)


async def test_stock_response_with_longest_entries_is_read() -> None:
    entry = {"token_id": 7, "token": "\u0001" * 16, "logprob": -0.5, "bytes": [255] * 64, "top_logprobs": []}
    choice = {"index": 0, "token_ids": [7] * 4096, "finish_reason": "stop", "logprobs": {"content": [entry] * 4096}}
    choice["weight_versions"] = [{"version": "3", "start": 0, "end": 4096}]
    text = json.dumps({"choices": [choice]})
    assert len(text) > ANSWER_BYTES

    async def answer(request: web.Request) -> web.Response:
        return web.Response(status=404) if request.path == ENGINE_GENERATE_PACKED else web.Response(text=text)

    async with engine(answer) as client:
        (completion,) = await ask(client, max_tokens=4096)
    assert len(completion.token_ids) == 4096


def test_oversized_version_number_is_an_engine_error() -> None:
    with pytest.raises(EngineError):
        expand_versions([{"version": "9" * 5000, "start": 0, "end": 1}], 1)
