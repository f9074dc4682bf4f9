"""Watches of kopf: their age, and the events that reach kopf."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from rlrun_operator.kube.resources import BY_KIND, POD, STATEFUL_SET, Resource
from rlrun_operator.runtime.cache import Store
from rlrun_operator.runtime.watch_health import STALE_SECONDS, Stream, Watches
from rlrun_operator.state import Manifest
from tests.unit.operator.edge.test_store import make_object

LISTED = {
    "metadata": {"resourceVersion": "5", "continue": "a-token"},
    "items": [{"metadata": {"name": "p", "namespace": "team-a"}}],
}


class Kopf:
    """Client that sends requests through the middleware like kopf's session."""

    def __init__(self, resource: Resource = POD, known: Callable[[Manifest], bool] = lambda found: False) -> None:
        self.time = 0.0
        self.listed: list[Stream] = []
        self.accepts: list[str] = []
        self.stream = Stream(resource, "team-a")
        self.watches = Watches([self.stream], on_listed=self.listed.append, known=known, clock=lambda: self.time)

    async def send(
        self, *, watch: bool, chunks: tuple[bytes, ...] = (), status: int = 200, at: tuple[float, ...] = ()
    ) -> bytes:
        from yarl import URL

        class Content:
            async def iter_chunked(self, size: int) -> Any:
                for chunk in chunks:
                    yield chunk

        class Response:
            def __init__(self) -> None:
                self.status, self.content = status, Content()

            async def read(self) -> bytes:
                return json.dumps(LISTED).encode()

        class Request:
            method = "GET"
            url = URL("http://api" + self.stream.resource.path("team-a")).with_query({"watch": "true"} if watch else {})

            def __init__(self) -> None:
                self.headers = {"Accept": "application/json"}

        async def handler(request: Any) -> Any:
            self.accepts.append(request.headers["Accept"])
            return Response()

        response: Any = await self.watches.observe_request(Request(), handler)  # type: ignore[arg-type]
        if not watch:
            return bytes(response._body)
        received = b""
        if watch and status == 200:
            times = iter(at)
            async for chunk in response.content.iter_chunked(1):
                received += chunk
                self.time = next(times, self.time)
        return received


async def test_watch_after_a_list_requests_a_comparison() -> None:
    kopf = Kopf()
    await kopf.send(watch=False)
    assert kopf.listed == []
    assert kopf.watches.stale_streams() == [kopf.stream], "listed is not watched"
    await kopf.send(watch=True, status=410)
    assert kopf.listed == []
    await kopf.send(watch=True)
    assert kopf.listed == [kopf.stream]
    await kopf.send(watch=True)
    assert kopf.listed == [kopf.stream]
    await kopf.send(watch=False)
    await kopf.send(watch=True)
    assert len(kopf.listed) == 2, "after a 410 kopf lists anew: deletions in between were never told"


async def test_kopf_list_contains_only_the_resource_version() -> None:
    found = json.loads(await Kopf().send(watch=False))
    assert (found["metadata"], found["items"]) == ({"resourceVersion": "5"}, [])


async def test_watch_is_stale_after_a_time_without_events() -> None:
    kopf = Kopf()
    await kopf.send(watch=True, chunks=(b'{"type":"BOOKMARK"}\n', b'{"type":"BOOKMARK"}\n'), at=(100.0, 200.0))
    assert kopf.watches.age(kopf.stream) == pytest.approx(100.0)
    kopf.time = 100.0 + STALE_SECONDS
    assert kopf.watches.stale_streams() == []
    kopf.time += 1.0
    assert kopf.watches.stale_streams() == [kopf.stream]


async def test_kopf_gets_complete_slim_lines_from_any_chunks() -> None:
    pod = make_object(
        "Pod", "p", 7, run="a", spec={"nodeName": "n", "volumes": [{"name": "v"}]}, status={"phase": "Running"}
    )
    pod["metadata"]["managedFields"] = [{"manager": "kubelet"}]
    bookmark = {"type": "BOOKMARK", "object": {"kind": "Pod", "metadata": {"resourceVersion": "9"}}}
    error = {"type": "ERROR", "object": {"kind": "Status", "code": 410}}
    sent = b"".join(json.dumps(e).encode() + b"\n" for e in ({"type": "ADDED", "object": pod}, bookmark, error))
    for cut in (1, 50, len(sent)):
        kopf = Kopf()
        chunks = tuple(sent[i : i + cut] for i in range(0, len(sent), cut))
        added, *others = map(json.loads, (await kopf.send(watch=True, chunks=chunks)).splitlines())
        assert others == [bookmark, error]
        assert added["type"] == "ADDED"
        assert added["object"]["metadata"]["resourceVersion"] == "7"
        assert added["object"]["spec"] == {"nodeName": "n"}
        assert "managedFields" not in added["object"]["metadata"]
    unreadable = (b"not json\n", b'{"type":"ADDED"}\n', sent, b'{"ha')
    assert (await Kopf().send(watch=True, chunks=unreadable)).count(b"\n") == 3, "one bad line costs no other"


async def test_part_watch_reads_and_stores_only_metadata() -> None:
    def event(kind: str, version: int, *fields: str) -> bytes:
        found = make_object("PartialObjectMetadata", "a-trainer", version, run="a")
        held = {"f:spec": {f"f:{name}": {} for name in fields}}
        mine = {"manager": "rlrun-operator", "operation": "Apply", "fieldsV1": held}
        other = {"manager": "kubectl-edit", "operation": "Update", "fieldsV1": {"f:spec": {"f:ports": {}}}}
        found["metadata"]["managedFields"] = [other, mine]
        return json.dumps({"type": kind, "object": found}).encode() + b"\n"

    kopf, store = Kopf(BY_KIND["Service"]), Store()
    told = await kopf.send(
        watch=True, chunks=(event("ADDED", 1, "ports"), event("MODIFIED", 2, "ports"), event("MODIFIED", 3))
    )
    await kopf.send(watch=False)
    assert [each.split(";")[1] for each in kopf.accepts] == ["as=PartialObjectMetadata", "as=PartialObjectMetadataList"]
    found = [json.loads(line)["object"] for line in told.splitlines()]
    assert [each["metadata"]["resourceVersion"] for each in found] == ["1", "3"], (
        "the second one changes nothing that is read"
    )
    assert {each["kind"] for each in found} == {"Service"}
    assert "managedFields" not in found[0]["metadata"]
    for each in found:
        store.put(each, 0.0)
    (kept,) = store.children(("ns", "a"))
    assert json.loads(kept["held"]) == {"f:metadata": {}, "f:spec": {}}


async def test_kopf_does_not_receive_events_of_own_writes() -> None:
    def event(kind: str, version: int, phase: str) -> bytes:
        return (
            json.dumps(
                {"type": kind, "object": make_object("Pod", "p", version, run="a", status={"phase": phase})}
            ).encode()
            + b"\n"
        )

    store = Store()
    store.put(make_object("Pod", "p", 2, run="a", status={"phase": "Pending"}), 0.0)
    kopf = Kopf(known=store.knows)
    sent = (event("ADDED", 2, "Pending"), event("MODIFIED", 3, "Running"), event("DELETED", 4, "Running"))
    told = [json.loads(line) for line in (await kopf.send(watch=True, chunks=sent)).splitlines()]
    assert [each["type"] for each in told] == ["MODIFIED", "DELETED"]
    assert not store.knows(told[0]["object"]), "what is asked is whether the store would take it in"
    store.put(told[0]["object"], 0.0)
    assert store.knows(told[0]["object"])
    other = make_object("Pod", "p", 9, run="a")
    other["metadata"]["uid"] = "another"
    assert not store.knows(other)
    uid = told[1]["object"]["metadata"]["uid"]
    store.remove("Pod", "ns", "p", uid)
    assert store.knows(told[0]["object"]), "a late event of what is gone"


async def test_kopf_does_not_receive_irrelevant_changes() -> None:
    def event(version: int, *, kind: str = "MODIFIED", replicas: int = 2, ready: int = 0) -> bytes:
        status = {"replicas": 2, "readyReplicas": ready, "observedGeneration": 1}
        sts = make_object("StatefulSet", "t", version, run="a", spec={"replicas": replicas}, status=status)
        return json.dumps({"type": kind, "object": sts}).encode() + b"\n"

    kopf = Kopf(STATEFUL_SET)
    events = (
        event(1, kind="ADDED"),
        event(2, ready=1),
        event(3, ready=2),
        event(4, replicas=0),
        event(5),
        event(6, kind="DELETED"),
    )
    told = (await kopf.send(watch=True, chunks=events)).splitlines()
    assert [json.loads(line)["object"]["metadata"]["resourceVersion"] for line in told] == ["1", "4", "5", "6"]
    assert await kopf.send(watch=True, chunks=(event(7, kind="ADDED"),)), "another life of the object"
    assert not await kopf.send(watch=True, chunks=(event(8, ready=1),)), "a watch that continues remembers"
    await kopf.send(watch=False)
    assert await kopf.send(watch=True, chunks=(event(9, ready=1),)), "one that begins anew does not"
