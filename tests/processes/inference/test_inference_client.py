"""Engine client: accepted completions and kinds of errors."""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web

from rlrun.inference.client.completions import Completion, EngineMetrics, expand_versions, parse_metrics, parse_stock
from rlrun.inference.client.engine_client import (
    EngineClient,
    EngineError,
    EngineUnavailableError,
)
from rlrun.protocol.messages.endpoints import ENGINE_GENERATE_PACKED
from tests.support.programs import run_program
from tests.support.waiting import result_of

METRICS = """# HELP vllm:num_requests_running x
vllm:num_requests_running{engine="0",model_name="a b"} 3.0
vllm:num_requests_running{engine="1",model_name="a b"} 4.0
vllm:num_requests_waiting{engine="0"} 2.0
vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 9.0
vllm:kv_cache_usage_perc{engine="0"} 0.25
vllm:kv_cache_usage_perc{engine="1"} 0.5
"""


def make_span(version: str, start: int, end: int) -> dict[str, Any]:
    return {"version": version, "start": start, "end": end}


def make_choice(index: int = 0, **overrides: Any) -> dict[str, Any]:
    content = [{"token_id": 7, "logprob": -0.5}, {"token_id": 8, "logprob": -1.5}]
    values: dict[str, Any] = {
        "index": index,
        "token_ids": [7, 8],
        "logprobs": {"content": content},
        "weight_versions": [make_span("3", 0, 1), make_span("4", 1, 2)],
        "finish_reason": "stop",
    }
    return values | overrides


def parse_response(document: Any, n: int) -> list[Completion]:
    return parse_stock(json.dumps(document).encode(), n)


def get_columns(completion: Completion) -> tuple[list[int], list[float], list[int], str]:
    ids, logprobs, versions = completion.token_ids, completion.logprobs, completion.versions
    return list(ids), list(logprobs), list(versions), completion.finish_reason


def test_stock_completion_has_logprob_and_version_per_token() -> None:
    second, first = make_choice(1), make_choice(0, token_ids=[], logprobs=None, weight_versions=None)
    empty, full = parse_response({"choices": [second, first]}, 2)
    assert get_columns(full) == ([7, 8], [-0.5, -1.5], [3, 4], "stop")
    assert get_columns(empty)[:3] == ([], [], [])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"token_ids": [7, 8, 9]}, "2 log-probs for 3 tokens"),
        ({"token_ids": [7, 9]}, "other tokens"),
        ({"weight_versions": None}, "0 of 2 tokens"),
        ({"weight_versions": [make_span("3", 0, 1)]}, "1 of 2 tokens"),
        ({"weight_versions": [make_span("3", 1, 2)]}, "do not cover"),
        ({"weight_versions": [make_span("3", 0, 2), make_span("4", 1, 2)]}, "do not cover"),
        ({"weight_versions": [make_span("default", 0, 2)]}, "unknown version"),
        ({"weight_versions": [make_span("unknown", 0, 2)]}, "unknown version"),
        ({"logprobs": None}, "lacks a field"),
        ({"logprobs": {"content": [{"token_id": 7, "logprob": -9999.0}] * 2}, "token_ids": [7, 7]}, "finite"),
        ({"logprobs": {"content": [{"token_id": 7, "logprob": float("nan")}] * 2}, "token_ids": [7, 7]}, "malformed"),
        ({"logprobs": {"content": [{"token_id": 7, "logprob": 0.5}] * 2}, "token_ids": [7, 7]}, "finite"),
        ({"logprobs": {"content": [{"token_id": 1 << 40, "logprob": -1}] * 2}, "token_ids": [1 << 40] * 2}, "32-bit"),
        ({"finish_reason": None}, "finish_reason"),
        ({"finish_reason": "abort"}, "did not finish"),
    ],
)
def test_stock_completion_without_logprob_or_version_is_refused(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(EngineError, match=message):
        parse_response({"choices": [make_choice(**overrides)]}, 1)


def test_missing_completion_is_an_error() -> None:
    with pytest.raises(EngineError, match="1 completions instead of 2"):
        parse_response({"choices": [make_choice()]}, 2)
    with pytest.raises(EngineError, match="lacks a field"):
        parse_response({}, 1)
    for nonsense in ({"choices": [{"index": "?"}]}, {"choices": ["?"]}, {"choices": [make_choice(token_ids=["?"])]}):
        with pytest.raises(EngineError, match="lacks a field"):
            parse_response(nonsense, 1)


def test_versions_are_expanded() -> None:
    assert list(expand_versions([make_span("1", 0, 2), make_span("12", 2, 3)], 3)) == [1, 1, 12]


def test_metrics_are_summed_over_engines() -> None:
    assert parse_metrics(METRICS) == EngineMetrics(running=7, waiting=2, kv_usage=0.5)
    preempted = METRICS + 'vllm:num_preemptions_total{engine="0"} 3.0\nvllm:num_preemptions_total{engine="1"} 4.0\n'
    assert parse_metrics(preempted) == EngineMetrics(running=7, waiting=2, kv_usage=0.5, preemptions=7)
    with pytest.raises(EngineError, match="not a number"):
        parse_metrics(METRICS.replace("3.0", "NaN"))
    with pytest.raises(EngineError, match="num_requests_running"):
        parse_metrics("vllm:other 1\n")


@pytest.fixture
async def engine() -> AsyncIterator[tuple[str, dict[str, Any]]]:
    """Fake server: `answers[path]` is (status, body), `seen` the last request."""
    state: dict[str, Any] = {"answers": {}, "seen": None, "hanging": asyncio.Event(), "closed": asyncio.Event()}

    async def handle(request: web.Request) -> web.Response:
        if request.path == ENGINE_GENERATE_PACKED and request.path not in state["answers"]:
            return web.Response(status=404)
        state["seen"] = (request.headers.get("authorization"), await request.text())
        status, body = state["answers"].get(request.path, (200, None))
        if body == "hang":
            state["hanging"].set()
            try:
                await asyncio.Event().wait()
            finally:
                state["closed"].set()
        return (
            web.Response(status=status, text=body) if isinstance(body, str) else web.json_response(body, status=status)
        )

    app = web.Application()
    app.router.add_route("*", "/{tail:.*}", handle)
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    yield f"http://127.0.0.1:{port}", state
    await runner.cleanup()


def start_generation(client: EngineClient, **options: Any) -> Any:
    defaults = {"n": 1, "max_tokens": 2, "temperature": 0.7, "top_p": 0.9, "stop_token_ids": [2], "cache_salt": "3"}
    return client.generate([1, 5], **(defaults | options))


async def test_generate_sends_key_salt_and_sampling(engine: tuple[str, dict[str, Any]]) -> None:
    url, state = engine
    state["answers"]["/inference/v1/generate"] = (200, {"choices": [make_choice()]})
    async with EngineClient(url + "/", "the-key") as client:
        (completion,) = await start_generation(client, parameters={"seed": 11})
    assert list(completion.versions) == [3, 4]
    authorization, text = state["seen"]
    body = json.loads(text)
    assert authorization == "Bearer the-key"
    assert (body["cache_salt"], body["token_ids"]) == ("3", [1, 5])
    sampling = body["sampling_params"]
    assert (sampling["temperature"], sampling["top_p"], sampling["logprobs"], sampling["seed"]) == (0.7, 0.9, 0, 11)


async def test_reply_is_parsed_by_engine_parser(engine: tuple[str, dict[str, Any]]) -> None:
    url, state = engine
    call = {"id": "x", "type": "function", "function": {"name": "calc", "arguments": "{}"}}
    path = "/v1/chat/completions/derender"
    async with EngineClient(url, "the-key") as client:
        state["answers"][path] = (200, {"choices": [{"message": {"content": None, "tool_calls": [call]}}]})
        assert await client.parse([7, 8], [{"type": "function"}]) == ("", [("calc", "{}")], None)
        sent = json.loads(state["seen"][1])
        assert sent["generate_response"]["choices"][0]["token_ids"] == [7, 8]
        assert sent["chat_request"]["tools"] == [{"type": "function"}]
        assert "chat_template_kwargs" not in sent["chat_request"]
        await client.parse([7, 8], [], {"enable_thinking": False})
        assert json.loads(state["seen"][1])["chat_request"]["chat_template_kwargs"] == {"enable_thinking": False}
        for name in ("reasoning", "reasoning_content"):
            state["answers"][path] = (200, {"choices": [{"message": {"content": "a", name: "t"}}]})
            assert await client.parse([7, 8], []) == ("a", [], "t")
        state["answers"][path] = (200, {"choices": []})
        with pytest.raises(EngineError, match="lacks a field"):
            await client.parse([7, 8], [])


@pytest.mark.parametrize(
    "body",
    [
        {"error": {"code": 400, "message": "no such path"}},
        {"error": {"message": "no such path", "type": "BadRequestError"}},
        {"message": "no such path"},
        "no such path",
        {"detail": "no such path"},
    ],
)
async def test_errors_carry_status_and_message(engine: tuple[str, dict[str, Any]], body: Any) -> None:
    url, state = engine
    state["answers"]["/rlrun/update_weights"] = (400, body)
    async with EngineClient(url, "the-key") as client:
        with pytest.raises(EngineError, match=r"returned 400: .*no such path") as error:
            await client.update_weights("/w", 1)
    assert error.value.status == 400
    assert not isinstance(error.value, EngineUnavailableError)


async def test_unready_engine_is_reported_and_proxy_error_raises(engine: tuple[str, dict[str, Any]]) -> None:
    url, state = engine
    async with EngineClient(url, "the-key") as client:
        state["answers"]["/rlrun/ready"] = (503, {"ready": False, "reason": "loading", "weight_version": None})
        readiness = await client.ready()
        assert (readiness.ready, readiness.reason) == (False, "loading")
        for body in ("upstream", {"error": "x"}, None):
            state["answers"]["/rlrun/ready"] = (503, body)
            with pytest.raises(EngineError):
                await client.ready()


async def test_missing_server_and_late_reply_are_unavailability(engine: tuple[str, dict[str, Any]]) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    async with EngineClient(f"http://127.0.0.1:{port}", "the-key") as client:
        with pytest.raises(EngineUnavailableError, match=f"127.0.0.1:{port}/rlrun/status"):
            await client.status()
    url, state = engine
    state["answers"]["/metrics"] = (200, "hang")
    async with EngineClient(url, "the-key", control_timeout=0.1) as client:
        with pytest.raises(EngineUnavailableError, match=r"no response within 0\.1 s"):
            await client.metrics()


async def test_cancelling_closes_the_connection(engine: tuple[str, dict[str, Any]]) -> None:
    url, state = engine
    state["answers"]["/inference/v1/generate"] = (200, "hang")
    async with EngineClient(url, "the-key") as client:
        task = asyncio.create_task(start_generation(client))
        await result_of(state["hanging"].wait(), "the request reaches the engine")
        task.cancel()
        await result_of(state["closed"].wait(), "the end of the connection")


async def test_client_closed_during_request_reports_unavailable_engine(engine: tuple[str, dict[str, Any]]) -> None:
    """The engine's pod and client are gone; other holders of the replica must get an engine error, not one of aiohttp."""
    url, state = engine
    state["answers"]["/inference/v1/generate"] = (200, "hang")
    client = EngineClient(url, "the-key")
    task = asyncio.create_task(start_generation(client))
    await result_of(state["hanging"].wait(), "the request reaches the engine")
    await result_of(asyncio.gather(client.close(), client.close()), "the end of the client")
    with pytest.raises(EngineUnavailableError):
        await result_of(task, "the end of the request")
    with pytest.raises(EngineUnavailableError, match="is closed"):
        await client.status()
    unused = EngineClient(url, "the-key")
    await unused.close()
    with pytest.raises(EngineUnavailableError, match="is closed"):
        await unused.status()


def test_client_imports_neither_vllm_nor_torch() -> None:
    code = "import sys, rlrun.inference.client.engine_client; print([m for m in ('vllm', 'torch', 'fastapi') if m in sys.modules])"
    result = run_program([sys.executable, "-c", code], check=True)
    assert result.stdout.strip() == "[]"
