"""Kueue edge: reads and writes of Workloads, and answers to failed requests."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from rlrun_operator.kube.client import Client, UnavailableError
from rlrun_operator.names import Ref
from rlrun_operator.providers.queue_answers import name_of
from rlrun_operator.reconcile.cache_feed import Feed
from rlrun_operator.reconcile.external_queue import ExternalQueue
from rlrun_operator.reconcile.kueue_queue import KueueAdapter
from rlrun_operator.reconcile.observe import LookUps
from rlrun_operator.reconcile.queue_objects import STALE_SECONDS, Cluster
from rlrun_operator.reconcile.queues import queue_of
from rlrun_operator.runtime.cache import Key, Store
from rlrun_operator.settings import QueueSettings, RenderSettings, from_environment
from rlrun_operator.state import Admission, Refusal
from tests.support.kueue import StandIn, condition
from tests.unit.operator.decide.kube import SMALLEST
from tests.unit.operator.edge.fake_api import FakeApi, Json, serve_api

PLACE = "/apis/kueue.x-k8s.io/v1beta2/namespaces/team-a/workloads"
NAME = name_of("a", "uid-a")
FLAVORS = {"h100": {"nodeLabels": {"gpu": "h100"}}}


class Bench:
    """Queue with an API server and one run `a`."""

    def __init__(self, api: FakeApi, client: Client, **settings: Any) -> None:
        self.api, self.store, self.time = api, Store(), 1000.0
        self.kueue = StandIn()
        self.woken: list[Key] = []
        cluster = Cluster(
            client=client,
            store=self.store,
            feed=Feed(self.store, client, lambda key, seconds: self.woken.append(key)),
            look_ups=LookUps(client, read_nodes=False),
            namespaces=("team-a",),
            serves=lambda run: True,
            is_active=lambda: True,
            requeue=lambda key, seconds: self.woken.append(key),
            now=lambda: self.time,
            clock=lambda: self.time,
        )
        found = queue_of(cluster, QueueSettings(provider="kueue", **{"flavors": FLAVORS} | settings), RenderSettings())
        assert isinstance(found, ExternalQueue)
        assert isinstance(found.adapter, KueueAdapter)
        self.queue, self.adapter = found, found.adapter

    def run(self, *, labels: Json | None = None, spec: Json | None = None, **status: Any) -> Json:
        metadata = {"name": "a", "namespace": "team-a", "uid": "uid-a", "generation": 1, "labels": labels or {}}
        metadata |= {"resourceVersion": str(self.api.version + 1000), "creationTimestamp": "2026-01-01T00:00:00Z"}
        document = {"apiVersion": "rlrun.io/v1alpha1", "kind": "RLRun", "metadata": metadata}
        document |= {"spec": {**SMALLEST, "queueName": "team-a"} | (spec or {}), "status": status}
        self.api.version += 1
        self.store.put(document, self.time)
        return document

    async def ask(self, run: Json) -> Admission | None:
        self.time += STALE_SECONDS + 1
        return await self.queue.answer(run)

    def workload(self) -> Json:
        return self.api.objects[f"{PLACE}/{NAME}"]

    def kueue_acts(self) -> None:
        """Process the stored Workload as Kueue does."""
        for one in self.kueue.act([self.workload()]):
            self.api._store(f"{PLACE}/{NAME}", one)


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    api = FakeApi()
    async with serve_api(api) as client:
        yield Bench(api, client)


def make_recorded_status(status: str = "True") -> Json:
    said = {
        "type": "Admitted",
        "status": status,
        "reason": "RoomFound",
        "message": "",
        "lastTransitionTime": "2026-01-01T00:00:00Z",
    }
    return {"phase": "Running", "attempt": 1, "launchedAttempt": 1, "conditions": [said]}


async def test_run_gets_one_workload_and_its_admitted_flavor(bench: Bench) -> None:
    run = bench.run()
    first = await bench.ask(run)
    assert first is not None
    assert (first.admitted, first.reason) == (False, "WaitingForTurn")
    assert condition(bench.workload(), "PodsReady")["reason"] == "WaitForStart"
    await bench.ask(run)
    assert [verb for verb, path in bench.api.writes() if path.endswith("workloads")] == ["create"]
    bench.kueue_acts()
    answer = await bench.ask(run)
    assert answer is not None
    assert answer.admitted
    assert answer.placed["trainer"].node_selector == {"gpu": "h100"}


@pytest.mark.parametrize(
    ("labels", "spec", "name", "queue"),
    [
        ({}, {"queueName": None}, "", None),
        ({}, {"queueName": None}, "spare", "spare"),
        ({"kueue.x-k8s.io/queue-name": "team-b"}, {"queueName": None}, "spare", "team-b"),
        ({"kueue.x-k8s.io/queue-name": "team-b"}, {}, "", "team-a"),
    ],
    ids=["none", "the chart's", "its label's", "its own"],
)
async def test_run_is_in_its_named_queue(labels: Json, spec: Json, name: str, queue: str | None) -> None:
    api = FakeApi()
    async with serve_api(api) as client:
        bench = Bench(api, client, name=name)
        answer = await bench.ask(bench.run(labels=labels, spec=spec))
        made = [one["spec"]["queueName"] for path, one in api.objects.items() if path.startswith(PLACE)]
        assert ((answer is None), made) == (queue is None, [queue] if queue else [])


async def test_run_started_before_the_queue_is_unchanged(bench: Bench) -> None:
    assert await bench.ask(bench.run(phase="Running", attempt=1, launchedAttempt=1)) is None
    assert bench.api.writes() == []


async def test_missing_kueue_blocks_only_new_runs(bench: Bench) -> None:
    run = bench.run()
    await bench.ask(run)
    bench.kueue_acts()
    assert (await bench.ask(run)).admitted  # type: ignore[union-attr]
    bench.api.hook = lambda verb, path, body: (404, "NotFound", "page not found") if "kueue" in path else None
    answer = await bench.ask(run)
    assert answer is not None
    assert (answer.reason, answer.admitted) == ("QueueUnavailable", False)
    assert answer.message.startswith(
        "Kueue is not installed: the cluster does not serve workloads.kueue.x-k8s.io/v1beta2"
    )
    assert ("team-a", "a") in bench.woken
    kept = await bench.ask(bench.run(**make_recorded_status()))
    assert kept is not None
    assert (kept.admitted, kept.placed["trainer"].node_selector) == (True, {"gpu": "h100"})
    bench.adapter._placed.clear()
    with pytest.raises(UnavailableError):
        await bench.ask(bench.run(**make_recorded_status()))


async def test_suspending_run_is_checked_until_its_quota_is_released(bench: Bench) -> None:
    run = bench.run()
    await bench.ask(run)
    bench.kueue_acts()
    await bench.ask(run)
    stopping = {**make_recorded_status("False")["conditions"][0], "type": "Suspended", "reason": "Suspending"}
    bench.woken.clear()
    await bench.ask(bench.run(spec={"suspend": True}, **make_recorded_status() | {"conditions": [stopping]}))
    assert (bench.woken.count(("team-a", "a")), bench.workload()["spec"]["active"]) == (1, True), "a pod may be unseen"
    rest = {**stopping, "status": "True", "reason": "Suspended"}
    await bench.ask(bench.run(spec={"suspend": True}, **make_recorded_status() | {"conditions": [rest]}))
    assert bench.workload()["spec"]["active"] is False


async def test_missing_right_is_reported(bench: Bench) -> None:
    message = 'User "x" cannot list resource "workloads"'
    bench.api.hook = lambda verb, path, body: (403, "Forbidden", message) if verb == "list" else None
    answer = await bench.ask(bench.run())
    assert answer is not None
    assert (
        answer.message
        == f"Kueue's Workloads may not be read: {message}; a helm upgrade of the operator's chart grants it"
    )


async def test_unavailable_webhook_neither_fails_nor_stops_a_run(bench: Bench) -> None:
    refusal = (500, "InternalError", 'failed calling webhook "mworkload.kb.io"')
    bench.api.hook = lambda verb, path, body: refusal if verb == "create" else None
    answer = await bench.ask(bench.run())
    assert answer is not None
    assert (answer.reason, answer.stops) == ("QueueUnavailable", False)
    assert 'failed calling webhook "mworkload.kb.io"' in answer.message
    assert answer.message.endswith("repair that webhook, or remove its configuration; the operator retries")
    bench.api.hook = lambda verb, path, body: None
    await bench.ask(bench.run())
    bench.kueue_acts()
    bench.api.hook = lambda verb, path, body: refusal if verb == "put" else None
    ready = [*make_recorded_status()["conditions"], {**make_recorded_status()["conditions"][0], "type": "PodsReady"}]
    answer = await bench.ask(bench.run(**make_recorded_status() | {"conditions": ready}))
    assert answer is not None
    assert answer.admitted
    bench.api.hook = lambda verb, path, body: None
    await bench.ask(bench.run(**make_recorded_status() | {"conditions": ready}))
    assert condition(bench.workload(), "PodsReady")["reason"] == "Started"


async def test_write_requires_the_observed_version(bench: Bench) -> None:
    run = bench.run()
    await bench.ask(run)
    bench.kueue_acts()
    await bench.ask(run)
    bench.api._store(f"{PLACE}/{NAME}", bench.kueue.preempt(bench.workload()))  # after the last list
    bench.time -= STALE_SECONDS
    ready = [*make_recorded_status()["conditions"], {**make_recorded_status()["conditions"][0], "type": "PodsReady"}]
    answer = await bench.queue.answer(bench.run(**make_recorded_status() | {"conditions": ready}))
    assert answer is not None
    assert (answer.stops, answer.reason) == (True, "Preempted"), "seen when readiness was to be written"
    assert condition(bench.workload(), "Evicted")["status"] == "True", "and not overwritten"


@pytest.mark.parametrize(
    ("refusal", "words"),
    [
        ((403, "Forbidden", 'User "x" cannot get resource "y"'), "may not be read by this operator; put it into queue.flavors of"),
        ((404, "NotFound", ""), "ResourceFlavor h100 does not exist; have it made, or name another one"),
    ],
    ids=["forbidden", "missing"],
)  # fmt: skip
async def test_unknown_flavor_creates_no_pods(refusal: tuple[int, str, str], words: str) -> None:
    api = FakeApi()
    async with serve_api(api) as client:
        bench = Bench(api, client, flavors={})
        run = bench.run()
        await bench.ask(run)
        bench.kueue_acts()
        api.hook = lambda verb, path, body: refusal if "resourceflavors" in path else None
        answer = await bench.ask(run)
        assert answer is not None
        assert (answer.admitted, answer.reason, words in answer.message) == (False, "QueueMisconfigured", True)
        api.hook = lambda verb, path, body: None
        api.objects["/apis/kueue.x-k8s.io/v1beta2/resourceflavors/h100"] = {"spec": {"nodeLabels": {"gpu": "x"}}}
        answer = await bench.ask(run)
        assert answer is not None
        assert answer.placed["inference"].node_selector == {"gpu": "x"}


PRIORITIES: list[tuple[Json, Json, Json, Json]] = [
    ({}, {}, {}, {"priority": 0}),
    ({}, {"priority": 7}, {}, {"priority": 7}),
    (
        {"kueue.x-k8s.io/priority-class": "prod"},
        {"priority": 7},
        {},
        {
            "priority": 1000,
            "priorityClassRef": {"group": "kueue.x-k8s.io", "kind": "WorkloadPriorityClass", "name": "prod"},
        },
    ),
    (
        {},
        {"trainer": {"priorityClassName": "high"}},
        {"high": 50},
        {"priority": 50, "priorityClassRef": {"group": "scheduling.k8s.io", "kind": "PriorityClass", "name": "high"}},
    ),
]


@pytest.mark.parametrize(("labels", "spec", "classes", "wanted"), PRIORITIES, ids=["none", "own", "label", "trainer's"])
async def test_priority_class_is_resolved_to_its_number(labels: Json, spec: Json, classes: Json, wanted: Json) -> None:
    api = FakeApi()
    api.objects["/apis/kueue.x-k8s.io/v1beta2/workloadpriorityclasses/prod"] = {"value": 1000}
    async with serve_api(api) as client:
        bench = Bench(api, client, priority_classes=classes)
        await bench.ask(bench.run(labels=labels, spec=spec))
        made = bench.workload()["spec"]
        assert {name: made[name] for name in ("priority", "priorityClassRef") if name in made} == wanted


def test_older_values_select_the_own_queue() -> None:
    assert from_environment({}).queue.kind == "none"
    assert from_environment({"RLRUN_QUEUE": '{"enabled": true}'}).queue.kind == "own"
    both = from_environment({"RLRUN_QUEUE": '{"enabled": true, "provider": "kueue"}'})
    assert (both.queue.kind, both.render.provider) == ("kueue", "kueue")


async def test_refused_status_is_reported_until_admitted(bench: Bench) -> None:
    words = 'workloads.kueue.x-k8s.io "w" is forbidden: User "sa" cannot update resource "workloads/status"'
    bench.api.hook = lambda verb, path, body: (403, "Forbidden", words) if path.endswith("/status") else None
    answer = await bench.ask(bench.run())
    assert answer is not None
    assert answer.refused == (Refusal(Ref("Workload", NAME), words, "be changed"),)
    bench.api.hook = lambda verb, path, body: None
    answer = await bench.ask(bench.run())
    assert answer is not None
    assert answer.refused == ()
