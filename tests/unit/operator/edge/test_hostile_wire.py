"""Hostile bytes from the API server over real HTTP: kopf's watches, the client and the store keep working without losing other
objects."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from random import Random
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from rlrun_operator.kube.client import Client, UnavailableError
from rlrun_operator.kube.resources import RLRUN, WATCHED, Resource
from rlrun_operator.reconcile import watch
from rlrun_operator.reconcile.cache_feed import Feed
from rlrun_operator.runtime.cache import Store
from rlrun_operator.runtime.watch_health import Stream, Watches
from rlrun_operator.validate_spec import judge_spec

NAMESPACE = "team-a"
RUNS = RLRUN.path(NAMESPACE)
SPEC = {
    "model": {"tiny": {}},
    "maxSteps": 4,
    "seqLen": 512,
    "environments": [{"id": "reverse-text"}],
    "storage": {"claimTemplate": {"size": "1Gi"}},
}


def nest_arrays(levels: int) -> bytes:
    return b"[" * levels + b"]" * levels


def make_run(name: str, version: int, args: bytes = b"{}", **metadata: Any) -> bytes:
    """RLRun as a list item, with `args` of its environment unchanged."""
    meta = {
        "name": name,
        "namespace": NAMESPACE,
        "uid": f"uid-{name}",
        "resourceVersion": str(version),
        "generation": 1,
    }
    manifest = {"metadata": meta | metadata, "spec": {**SPEC, "environments": [{"id": "reverse-text", "args": "@"}]}}
    return json.dumps(manifest).encode().replace(b'"@"', args)


def make_event(kind: str, item: bytes) -> bytes:
    typed = b'{"apiVersion":"%s","kind":"RLRun",%s' % (RLRUN.api_version.encode(), item[1:])
    return b'{"type":"%s","object":%s}\n' % (kind.encode(), typed)


@dataclass
class Wire:
    """API server that sends arbitrary bytes."""

    runs: list[bytes] = field(default_factory=list)
    events: asyncio.Queue[bytes] = field(default_factory=asyncio.Queue)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        path = request.path
        if not path.endswith(tuple(f"/{resource.plural}" for resource in WATCHED)):
            return web.json_response(_discovery(path))
        if request.query.get("watch") == "true":
            return await self._watch(request)
        items = b",".join(self.runs) if path == RUNS else b""
        return web.Response(
            body=b'{"metadata":{"resourceVersion":"5"},"items":[%s]}' % items, content_type="application/json"
        )

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            if request.path != RUNS:
                await asyncio.sleep(3600)
            await response.write(await self.events.get())


def _discovery(path: str) -> dict[str, Any]:
    if path == "/api":
        return {"versions": ["v1"]}
    if path == "/apis":
        versions = {each.group: {"version": each.version} for each in WATCHED if each.group}
        return {"groups": [{"name": n, "versions": [v], "preferredVersion": v} for n, v in versions.items()]}
    verbs = ["get", "list", "watch", "patch"]
    namespaces = Resource(
        "Namespace", "", "v1", "namespaces", namespaced=False
    )  # kopf requires that these resources exist
    kinds = [
        {"name": each.plural, "singularName": "", "kind": each.kind, "namespaced": each.namespaced, "verbs": verbs}
        for each in (*WATCHED, namespaces)
        if path == (f"/apis/{each.group}/{each.version}" if each.group else f"/api/{each.version}")
    ]
    return {"resources": kinds}


@dataclass
class Watched:
    wire: Wire
    store: Store
    feed: Feed
    watcher: watch.Watcher
    watches: Watches
    client: Client

    async def until(self, holds: Callable[[], bool], seconds: float = 20.0) -> None:
        try:
            async with asyncio.timeout(seconds):
                while not holds():  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
        except TimeoutError:
            raise AssertionError(f"known after {seconds} s: {sorted(self.store.idents_of(RLRUN.kind, None))}") from None

    def knows(self, name: str, version: int) -> bool:
        found = self.store.get(RLRUN.kind, NAMESPACE, name)
        return found is not None and int(found["metadata"]["resourceVersion"]) >= version


@asynccontextmanager
async def watch_wire(wire: Wire) -> AsyncIterator[Watched]:
    app = web.Application()
    app.router.add_route("*", "/{tail:.*}", wire.handle)
    server = TestServer(app)
    await server.start_server()
    address = str(server.make_url("")).rstrip("/")
    store = Store()
    async with aiohttp.ClientSession() as session:
        client = Client(session, address)
        feed = Feed(store, client, lambda key, delay: None)
        home, comparing = asyncio.get_running_loop(), set[Any]()

        def listed(stream: Stream) -> None:
            comparing.add(asyncio.run_coroutine_threadsafe(feed.compare_stream(stream), home))

        watches = Watches([Stream(resource, NAMESPACE) for resource in WATCHED], on_listed=listed)
        watcher = watch.Watcher(
            [NAMESPACE],
            server=address,
            session=lambda: aiohttp.ClientSession(middlewares=[watches.observe_request]),
            on_object=feed.on_object,
        )
        watcher.start()
        try:
            yield Watched(wire, store, feed, watcher, watches, client)
        finally:
            watcher.stop()
    await server.close()


@pytest.mark.parametrize("levels", [150, 300, 3000, 100_000])
async def test_deep_object_is_refused_without_harming_others(levels: int) -> None:
    wire = Wire(
        [make_run("a-healthy", 1), make_run("hostile", 2, b'{"x":%s}' % nest_arrays(levels)), make_run("z-healthy", 3)]
    )
    async with watch_wire(wire) as seen:
        await seen.until(lambda: all(seen.knows(name, 1) for name in ("a-healthy", "hostile", "z-healthy")))
        await seen.until(lambda: not seen.watches.stale_streams())
        await wire.events.put(make_event("MODIFIED", make_run("hostile", 6, b'{"y":%s}' % nest_arrays(levels))))
        await wire.events.put(make_event("MODIFIED", make_run("z-healthy", 7)))
        await wire.events.put(make_event("ADDED", make_run("young", 8)))
        await seen.until(lambda: seen.knows("hostile", 6) and seen.knows("z-healthy", 7) and seen.knows("young", 8))
        await wire.events.put(make_event("DELETED", make_run("hostile", 9, b'{"y":%s}' % nest_arrays(levels))))
        found = seen.store.get(RLRUN.kind, NAMESPACE, "hostile")
        assert found is not None
        said = judge_spec(found | {"apiVersion": RLRUN.api_version})
        assert said.spec is None
        assert "environments[0].args: nested" in said.problems
        assert "at most 32 are allowed; flatten it" in said.problems
        await seen.until(lambda: seen.store.get(RLRUN.kind, NAMESPACE, "hostile") is None)
        assert (
            judge_spec(seen.store.get(RLRUN.kind, NAMESPACE, "young") | {"apiVersion": RLRUN.api_version}).spec
            is not None
        )
        assert not seen.watcher.has_ended()


async def test_client_reads_deep_lists_and_responses() -> None:
    wire = Wire([make_run("hostile", 2, b'{"x":%s}' % nest_arrays(3000)), make_run("healthy", 3)])
    async with watch_wire(wire) as seen:
        names = [item["metadata"]["name"] async for item in seen.client.list(RLRUN, NAMESPACE)]
    assert names == ["hostile", "healthy"]


async def test_malformed_list_items_are_skipped() -> None:
    wire = Wire(
        [b'{"metadata":5}', b"null", b"7", make_run("healthy", 3), b'{"spec":{}}', b'{"metadata":{"name":["x"]}}']
    )
    async with watch_wire(wire) as seen:
        await seen.feed.compare_stream(Stream(RLRUN, NAMESPACE))
        assert seen.store.idents_of(RLRUN.kind, None) == {(RLRUN.kind, NAMESPACE, "healthy")}


async def test_malformed_watch_events_are_skipped_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    wire = Wire([b'{"metadata":5}', b"null", make_run("healthy", 3), b'{"spec":{}}'])
    random = Random(11)
    async with watch_wire(wire) as seen:
        with caplog.at_level(logging.ERROR):
            await seen.until(lambda: seen.knows("healthy", 3))
            await seen.until(lambda: not seen.watches.stale_streams())
            for version in range(10, 60):
                await wire.events.put(_make_malformed_line(random, make_run("healthy", 4)))
                await wire.events.put(make_event("MODIFIED", make_run("healthy", version, b'{"seed":%d}' % version)))
            await seen.until(lambda: seen.knows("healthy", 59))
        assert seen.store.idents_of(RLRUN.kind, None) == {(RLRUN.kind, NAMESPACE, "healthy")}
        assert not any("the watches ended" in record.message for record in caplog.records), "one connection bore it all"
        assert any("was skipped" in record.message for record in caplog.records)


def _make_malformed_line(random: Random, item: bytes) -> bytes:
    """Return a malformed watch event, or an event whose object is malformed."""
    whole = make_event("MODIFIED", item)[:-1]
    at = random.randrange(len(whole))
    return (
        random.choice(
            (
                whole[:at],
                whole[at:],
                b'{"type":"MODIFIED"}',
                b'{"type":"MODIFIED","object":null}',
                b'{"type":"ADDED","object":{"metadata":{}}}',
                b'{"type":"ADDED","object":{"kind":"RLRun","metadata":{"name":["x"],"uid":{}}}}',
                b"[]",
                b"3",
                nest_arrays(5000),
                b"[" * 5000,
                b"\xff\xfe",
                b"",
            )
        )
        + b"\n"
    )


@pytest.mark.parametrize("body", [b"", b"[1]", b"{", b"[" * 300, b"\xff"])
async def test_malformed_response_is_unavailable_not_empty(body: bytes) -> None:
    async def answer(_: web.Request) -> web.Response:
        return web.Response(body=body, content_type="application/json")

    app = web.Application()
    app.router.add_route("*", "/{tail:.*}", answer)
    server = TestServer(app)
    await server.start_server()
    async with aiohttp.ClientSession() as session:
        client = Client(session, str(server.make_url("")).rstrip("/"))
        with pytest.raises(UnavailableError, match="is unreadable"):
            await client.get(RLRUN, NAMESPACE, "x")
        with pytest.raises(UnavailableError, match="is unreadable"):
            _ = [item async for item in client.list(RLRUN, NAMESPACE)]
    await server.close()


async def test_silent_watch_is_dead_only_while_server_answers() -> None:
    now = 1000.0
    stream = Stream(RLRUN, NAMESPACE)
    watches = Watches([stream], clock=lambda: now)
    assert watches.dead(answering=100.0) == [], "it may still come"
    assert watches.dead(answering=200.0) == [stream]
    assert watches.dead(answering=0.0) == [], "nothing answers: no matter of this watch"
    watches._states[stream].alive_at = 1000.0
    now = 1170.0
    assert watches.dead(answering=9999.0) == []
    now = 1190.0
    assert watches.dead(answering=9999.0) == [stream]
