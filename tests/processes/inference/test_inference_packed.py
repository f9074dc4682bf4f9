"""Packed requests and responses: complete validation, and reading that does not block an event loop."""

from __future__ import annotations

import asyncio
import json
import selectors
import subprocess
import sys
import threading
import time
from array import array
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import httpx
import pytest
from aiohttp import web
from fastapi import FastAPI, Request

from rlrun.diagnostics import heap
from rlrun.inference.client.completions import Adapter, EngineError, parse_packed
from rlrun.inference.client.engine_client import EngineClient
from rlrun.inference.guard import GUEST
from rlrun.inference.http.generate import GONE, GenerateError, Head, SampledTokens, generate_router
from rlrun.protocol.messages.endpoints import ENGINE_GENERATE, ENGINE_GENERATE_PACKED
from rlrun.protocol.messages.packed_columns import FLOATS, INTEGERS, PackedError, Reader, integer_column, pack_document

LONG, GROUP = 65_536, 16
CHOICE = {"tokens": 2, "finish_reason": "stop", "weight_versions": [{"version": "3", "start": 0, "end": 2}]}


def pack_completion(
    *, model: str = "m", ids: list[int] | None = None, logprobs: list[float] | None = None, **choice: Any
) -> bytes:
    head = {"model": model, "choices": [CHOICE | choice]}
    return pack_document(head, [array(INTEGERS, ids or [7, 8]), array(FLOATS, logprobs or [-0.5, -1.5])])


def test_packed_columns_are_read_unchanged() -> None:
    ids, logprobs = array(INTEGERS, [0, 1, 2**31 - 1]), array(FLOATS, [-0.25, -1e-8])
    reader = Reader(pack_document({"a": "\u00e9" * 3}, [ids, logprobs]))
    assert reader.head == {"a": "\u00e9" * 3}
    assert (reader.column(INTEGERS, 3), reader.column(FLOATS, 2)) == (ids, logprobs)
    reader.end()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\x01", "too few"),
        (b"\xff\xff\xff\x7f{}", "does not fit"),
        (b"\x04\x00\x00\x00{a} ", "not JSON"),
        (b"\x04\x00\x00\x00[1] ", "not a JSON object"),
        (b"\x04\x00\x00\x00[[[[", "not JSON"),
    ],
)
def test_invalid_packed_document_is_refused(data: bytes, message: str) -> None:
    with pytest.raises(PackedError, match=message):
        Reader(data)


def test_packed_completion_has_logprob_and_version_per_token() -> None:
    spans = [{"version": "3", "start": 0, "end": 1}, {"version": "4", "start": 1, "end": 2}]
    (found,) = parse_packed(pack_completion(weight_versions=spans), 1)
    assert (list(found.token_ids), list(found.logprobs), list(found.versions)) == ([7, 8], [-0.5, -1.5], [3, 4])
    assert list(parse_packed(pack_completion(model="run-v9"), 1, Adapter("run-v9", 9))[0].versions) == [9, 9]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (pack_completion(tokens=3), "does not fit"),
        (
            pack_completion(tokens=1, weight_versions=[CHOICE["weight_versions"][0] | {"end": 1}]),
            "follow the last column",
        ),
        (pack_completion(tokens=-1), "does not fit"),
        (pack_completion(tokens="2"), "lacks a field"),
        (pack_completion(logprobs=[-0.5, float("nan")]), "finite"),
        (pack_completion(logprobs=[-0.5, -float("inf")]), "finite"),
        (pack_completion(logprobs=[-0.5, 0.5]), "finite"),
        (pack_completion(finish_reason="abort"), "did not finish"),
        (pack_completion(weight_versions=[]), "0 of 2"),
        (pack_completion(weight_versions=None), "lacks a field"),
        (pack_completion(weight_versions=[{"version": "default", "start": 0, "end": 2}]), "unknown version"),
        (pack_completion(weight_versions=[{"version": "3", "start": 0, "end": 2**40}]), "do not cover"),
        (pack_completion()[:-1], "does not fit"),
        (pack_document({"model": "m"}, []), "lacks a field"),
        (pack_document({"model": "m", "choices": []}, []), "0 completions instead of 1"),
        (b"<html>", "lacks a field"),
    ],
)
def test_packed_completion_without_logprob_or_version_is_refused(data: bytes, message: str) -> None:
    with pytest.raises(EngineError, match=message):
        parse_packed(data, 1)


def test_response_of_another_model_is_refused() -> None:
    with pytest.raises(EngineError, match="m answered a request for run-v8"):
        parse_packed(pack_completion(), 1, Adapter("run-v8", 8))


# ---- server


class Engine:
    """Engine that returns the reversed prompt and holds only one adapter."""

    def __init__(self) -> None:
        self.asked: list[Head] = []

    async def sample_tokens(self, head: Head, prompt: array[int]) -> tuple[str, list[SampledTokens]]:
        if head.model not in (None, "held"):
            raise GenerateError(f"the model {head.model} does not exist", GONE)
        self.asked.append(head)
        ids = prompt[::-1]
        one = SampledTokens(ids, array(FLOATS, [-0.5] * len(ids)), [("3", 0, len(ids))], "stop")
        return head.model or "m", [one] * head.sampling_params.n


def pack_request(head: dict[str, Any], prompt: list[int]) -> bytes:
    return pack_document({"tokens": len(prompt), "sampling_params": {"max_tokens": 4}} | head, [integer_column(prompt)])


class Owned:
    """Weight transfer of an engine that holds one adapter of one guest."""

    handover = property(lambda self: self)

    def holds_for(self, run: str, model: str | None) -> bool:
        return (run, model) == ("a-guest", "held")


async def send_request(data: bytes, guest: str | None = None) -> httpx.Response:
    app = FastAPI()
    app.state.rlrun = Owned()
    app.include_router(generate_router(Engine()))
    if guest is not None:

        @app.middleware("http")
        async def name(request: Request, go_on: Any) -> Any:
            request.scope[GUEST] = guest
            return await go_on(request)

    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://engine") as client:
        return await client.post(ENGINE_GENERATE_PACKED, content=data)


async def test_client_reads_response_of_packed_route() -> None:
    answer = await send_request(pack_request({"sampling_params": {"max_tokens": 4, "n": 2}}, [5, 6, 7]))
    first, second = parse_packed(answer.content, 2)
    assert list(first.token_ids) == list(second.token_ids) == [7, 6, 5]
    assert list(first.versions) == [3, 3, 3]


@pytest.mark.parametrize(
    ("guest", "model", "status"),
    [
        (None, None, 200),
        ("a-guest", "held", 200),
        ("a-guest", None, GONE),
        ("a-guest", "m", GONE),
        ("another", "held", GONE),
    ],
)
async def test_guest_may_use_only_its_own_adapters(guest: str | None, model: str | None, status: int) -> None:
    answer = await send_request(pack_request({} if model is None else {"model": model}, [5, 6, 7]), guest)
    assert answer.status_code == status, answer.text


@pytest.mark.parametrize(
    ("data", "status", "message"),
    [
        (b"{}", 400, "not a packed document"),
        (pack_request({"tokens": 9}, [1]), 400, "column of 9 values"),
        (pack_request({}, []), 422, "tokens: Input should be greater than or equal to 1"),
        (pack_request({"sampling_params": {}}, [1]), 422, "sampling_params.max_tokens: Field required"),
        (
            pack_request({"sampling_params": {"max_tokens": 1, "temperature": -1}}, [1]),
            422,
            "sampling_params.temperature",
        ),
        (pack_request({"colour": 1}, [1]), 422, "colour: Extra inputs"),
        (pack_request({}, [3, -1]), 422, "negative token id: -1"),
        (pack_request({"model": "gone"}, [1]), GONE, "gone does not exist"),
    ],
)
async def test_bad_request_gets_specific_error(data: bytes, status: int, message: str) -> None:
    answer = await send_request(data)
    assert answer.status_code == answer.json()["error"]["code"] == status
    assert message in answer.json()["error"]["message"]


# ---- client with servers of both kinds


@asynccontextmanager
async def serve_routes(routes: dict[str, Callable[[web.Request], Any]]) -> AsyncIterator[str]:
    app = web.Application(client_max_size=2**26)
    for path, handler in routes.items():
        app.router.add_post(path, handler)
    runner = web.AppRunner(
        app, handler_cancellation=True
    )  # Without this, cleanup waits a minute for handlers without a client.
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def start_generation(client: EngineClient, **options: Any) -> Any:
    defaults = {"n": 1, "max_tokens": 4, "temperature": 1.0, "top_p": 1.0, "stop_token_ids": [2], "cache_salt": "3"}
    return client.generate([5, 6], **(defaults | options))


async def test_server_without_packed_route_gets_stock_requests() -> None:
    asks: list[str] = []
    entry = {"token_id": 7, "logprob": -0.5}
    choice = {"index": 0, "token_ids": [7], "logprobs": {"content": [entry]}, "finish_reason": "stop"}
    choice["weight_versions"] = [{"version": "3", "start": 0, "end": 1}]

    async def refuses(_: web.Request) -> web.Response:
        asks.append("packed")
        return web.json_response({"error": {"code": 403, "message": "this route is not served"}}, status=403)

    async def stock(asking: web.Request) -> web.Response:
        asks.append("stock")
        assert (await asking.json())["token_ids"] == [5, 6]
        return web.json_response({"choices": [choice]})

    async def update(_: web.Request) -> web.Response:
        return web.json_response({"seconds": {}})

    routes = {ENGINE_GENERATE_PACKED: refuses, ENGINE_GENERATE: stock, "/rlrun/update_weights": update}
    async with serve_routes(routes) as url, EngineClient(url, "key") as client:
        for _ in range(2):
            (completion,) = await start_generation(client)
            assert list(completion.token_ids) == [7]
        assert asks == ["packed", "stock", "stock"]
        await client.update_weights("/w", 3)
        await start_generation(client)
        assert asks[3:] == ["packed", "stock"]


async def test_large_group_is_requested_in_parts_with_own_seeds() -> None:
    heads: list[dict[str, Any]] = []
    release = asyncio.Event()

    async def answers(asking: web.Request) -> web.Response:
        head = Reader(await asking.read()).head
        heads.append(head)
        if len(heads) == 4:
            release.set()
        await release.wait()  # All parts are in flight at once.
        n = head["sampling_params"]["n"]
        token = array(INTEGERS, [head["sampling_params"]["seed"]] * 2)
        columns = [column for _ in range(n) for column in (token, array(FLOATS, [-0.5, -0.5]))]
        return web.Response(body=pack_document({"model": "m", "choices": [CHOICE] * n}, columns))

    async with serve_routes({ENGINE_GENERATE_PACKED: answers}) as url, EngineClient(url, "key") as client:
        completions = await start_generation(client, n=14, max_tokens=1 << 17, parameters={"seed": 100})
    assert len(completions) == 14
    by_seed = sorted(heads, key=lambda head: head["sampling_params"]["seed"])
    assert [head["sampling_params"]["n"] for head in by_seed] == [4, 4, 4, 2]
    assert [c.token_ids[0] for c in completions] == [100] * 4 + [104] * 4 + [108] * 4 + [112] * 2


async def test_failed_part_fails_only_its_request() -> None:
    async def answers(asking: web.Request) -> web.Response:
        head = Reader(await asking.read()).head
        if head["sampling_params"]["n"] == 1:
            return web.json_response({"error": {"message": "too long"}}, status=400)
        return await asyncio.Event().wait()  # type: ignore[func-returns-value]

    async with serve_routes({ENGINE_GENERATE_PACKED: answers}) as url, EngineClient(url, "key") as client:
        with pytest.raises(EngineError, match="returned 400: too long") as error:
            await start_generation(client, n=5, max_tokens=1 << 17)
    assert error.value.status == 400


# ---- a response with 16 x 65,536 tokens

SERVER = """
import asyncio, json, sys
from array import array
from aiohttp import web
from rlrun.protocol.messages.endpoints import ENGINE_GENERATE, ENGINE_GENERATE_PACKED
from rlrun.protocol.messages.packed_columns import Reader, pack_document

LONG, with_packed = int(sys.argv[1]), sys.argv[2] == "packed"
spans = [{"version": "3", "start": 0, "end": LONG}]
ids, logprobs = array("i", range(LONG)), array("f", [-0.5]) * LONG
content = [{"token_id": i, "logprob": -0.5, "rank": 1, "top_logprobs": [], "token": f"token_id:{i}"} for i in range(LONG)]
stock = {"index": 0, "token_ids": ids.tolist(), "logprobs": {"content": content}, "finish_reason": "length", "weight_versions": spans}
text = json.dumps(stock)

async def packs(request):
    if not with_packed:
        return web.Response(status=404)
    n = Reader(await request.read()).head["sampling_params"]["n"]
    choice = {"tokens": LONG, "finish_reason": "length", "weight_versions": spans}
    return web.Response(body=pack_document({"model": "m", "choices": [choice] * n}, [ids, logprobs] * n))

async def stocks(request):
    n = (await request.json())["sampling_params"]["n"]
    return web.Response(text='{"choices": [%s]}' % ", ".join([text] * n), content_type="application/json")

async def serve():
    app = web.Application(client_max_size=2**26)
    app.router.add_post(ENGINE_GENERATE_PACKED, packs)
    app.router.add_post(ENGINE_GENERATE, stocks)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    print(runner.addresses[0][1], flush=True)
    await asyncio.Event().wait()

asyncio.run(serve())
"""


@pytest.fixture(params=["packed", "stock"])
def long_engine(request: pytest.FixtureRequest) -> Iterator[str]:
    command = [sys.executable, "-c", SERVER, str(LONG), request.param]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{process.stdout.readline().strip()}"
        process.kill()


class Busy(selectors.DefaultSelector):  # type: ignore[misc, valid-type]
    """Selector that measures the longest computation of the loop between two polls, in CPU seconds of its thread.

    Unlike the wall clock, this does not grow if other processes use the cores.
    """

    longest = 0.0
    _since: float | None = None

    def select(self, timeout: float | None = None) -> Any:
        if self._since is not None:
            self.longest = max(self.longest, time.thread_time() - self._since)
        found = super().select(timeout)
        self._since = time.thread_time()
        return found


def test_huge_response_does_not_block_event_loop(long_engine: str) -> None:
    """A group of 16 x 65,536 tokens, compared with the time to parse the same amount of JSON on this machine."""
    entry = {"token_id": 123_456, "logprob": -0.5, "rank": 1, "top_logprobs": [], "token": "token_id:123456"}
    text = json.dumps([entry] * LONG)
    began = time.thread_time()
    json.loads(text)
    parsing = GROUP * (time.thread_time() - began)
    threads = threading.active_count()

    selector = Busy()

    async def group() -> Any:
        async with EngineClient(long_engine, "key") as client:
            await start_generation(
                client, max_tokens=LONG
            )  # First use includes imports and connections, which do not belong to a response.
            selector.longest = 0.0
            return await start_generation(client, n=GROUP, max_tokens=LONG), selector.longest

    slices = heap.Slices()
    slices.begin()  # As in the orchestrator: a full collection would visit all objects that pytest has loaded.
    try:
        with asyncio.Runner(loop_factory=partial(asyncio.SelectorEventLoop, selector)) as runner:
            completions, longest = runner.run(group())
    finally:
        slices.end()
    assert [len(completion.token_ids) for completion in completions] == [LONG] * GROUP
    assert all(completion.token_ids[-1] == LONG - 1 for completion in completions)
    assert longest < parsing / 50, f"the loop computed {longest:.4f} s at once; parsing all takes {parsing:.3f} s"
    assert threading.active_count() - threads <= 4
