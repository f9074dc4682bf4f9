"""Reads that explain a wait, and events that a pass posts."""

from __future__ import annotations

import asyncio

import pytest

from rlrun_operator.reconcile.observe import _Shared
from rlrun_operator.state import Decision, EventRecord, Manifest, Observed
from tests.unit.operator.decisions import scripted_decision
from tests.unit.operator.edge.fake_api import FakeApi, serve_api
from tests.unit.operator.edge.test_reconcile import Bench, make_child


async def test_lookups_are_on_demand_and_cached() -> None:
    api = FakeApi()
    events = "/api/v1/namespaces/ns/events"
    mine: Manifest = {"message": "no node", "involvedObject": {"kind": "Pod", "name": "a-trainer-0"}}
    for name, event in (
        ("1", mine),
        ("2", {"message": "not mine", "involvedObject": {"kind": "Pod", "name": "b-trainer-0"}}),
        ("3", {"message": "quota", "involvedObject": {"kind": "ReplicaSet", "name": "a-inference-abc"}}),
    ):
        api.seed(f"{events}/{name}", {**event, "metadata": {}})
    api.seed("/api/v1/nodes/n1", {"metadata": {}, "status": {"images": ["big"], "allocatable": {"cpu": "4"}}})

    def brain(observed: Observed) -> Decision:
        told = sorted(event["message"] for event in observed.events)
        return scripted_decision(status={"told": told}, look_up=frozenset({"events", "nodes"}))

    async with serve_api(api) as client:
        bench = Bench(api, client, brain)
        bench.store.put(api.seed("/api/v1/namespaces/ns/pods/a-trainer-0", make_child("Pod", "a-trainer-0")), 0.0)
        await bench.go()
        await bench.go()
        assert bench.status == {"told": ["no node", "quota"]}
        nodes = bench.seen[-1].nodes
        assert nodes is not None
        assert nodes[0]["status"] == {"allocatable": {"cpu": "4"}}
        assert [verb for verb, _ in api.requests].count("list") == 2, "one list of events, one of nodes"
        bench.time += 6
        await bench.go()
        assert [verb for verb, _ in api.requests].count("list") == 4


async def test_concurrent_lookups_share_a_request_cached_by_duration() -> None:
    time, slow, asked = 100.0, 30.0, 0

    async def ask() -> tuple[int, float]:
        nonlocal time, asked
        asked += 1
        await asyncio.sleep(0.01)
        time += slow
        return asked, 5.0

    shared = _Shared(ask, lambda: time)
    assert await asyncio.gather(*(shared.get() for _ in range(8))) == [1] * 8
    time += 500.0
    assert await shared.get() == 1, "a request of 30 s is one in ten minutes"
    time += 71.0
    slow = 0.0
    assert await shared.get() == 2
    time += 5.0
    assert await shared.get() == 3


async def test_unreadable_events_keep_previous_events() -> None:
    """Large clusters store events in a separate etcd."""
    api = FakeApi()
    old = {"type": "Warning", "reason": "FailedCreate", "message": "no room", "involvedObject": {"name": "a"}}
    api.seed("/api/v1/namespaces/ns/events/one", {**old, "metadata": {}})

    def brain(observed: Observed) -> Decision:
        return scripted_decision(
            status={"told": [e["message"] for e in observed.events]}, look_up=frozenset({"events"})
        )

    async with serve_api(api) as client:
        bench = Bench(api, client, brain)
        await bench.go()
        api.hook = lambda verb, path, body: (500, "", "etcdserver: request timed out") if verb == "list" else None
        bench.time += 10
        await bench.go()
        assert bench.seen[-1].events == bench.seen[1].events != ()
    assert bench.status == {"told": ["no room"]}


async def test_forbidden_lookups_are_skipped_and_cached() -> None:
    api = FakeApi()
    api.hook = lambda verb, path, body: (403, "Forbidden", 'User "sa" cannot list resource') if verb == "list" else None
    async with serve_api(api) as client:
        bench = Bench(
            api,
            client,
            lambda observed: scripted_decision(status={"phase": "Starting"}, look_up=frozenset({"events", "nodes"})),
        )
        for _ in range(3):
            bench.time += 10
            await bench.go()
    assert bench.status == {"phase": "Starting"}
    assert [verb for verb, _ in api.requests].count("list") == 2, "a refusal is the answer for minutes"


async def test_repeated_event_increases_its_count() -> None:
    api, phase = FakeApi(), 0
    async with serve_api(api) as client:
        bench = Bench(
            api,
            client,
            lambda observed: scripted_decision(
                status={"n": phase}, events=(EventRecord("Warning", "Restarting", "x" * 2000),)
            ),
        )
        for number in range(3):
            phase = number
            bench.time += 5
            await bench.go()
    events = [o for o in api.objects.values() if o["kind"] == "Event"]
    assert [(e["count"], e["reason"], e["involvedObject"]["uid"]) for e in events] == [(3, "Restarting", bench.uid)]
    assert len(events[0]["message"]) <= 1024


async def test_event_is_logged_with_its_run(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    api, told = FakeApi(), (EventRecord("Normal", "Training", "attempt 1 trains"),)
    async with serve_api(api) as client:
        await Bench(api, client, lambda observed: scripted_decision(status={"n": 1}, events=told)).go()
    assert any(line.endswith(": Training: attempt 1 trains") for line in caplog.messages), caplog.messages


async def test_refused_event_does_not_fail_the_pass() -> None:
    api = FakeApi()
    api.hook = lambda verb, path, body: (403, "Forbidden", "no") if path.endswith("/events") else None
    async with serve_api(api) as client:
        bench = Bench(
            api,
            client,
            lambda observed: scripted_decision(status={"a": 1}, events=(EventRecord("Normal", "Started", "go"),)),
        )
        await bench.go()
    assert bench.status == {"a": 1}
