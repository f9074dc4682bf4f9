"""Volcano edge: reads and writes of PodGroups, and answers to failed requests."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from rlrun_operator.kube.client import Client
from rlrun_operator.names import ROLES, SPOT_SET, Ref
from rlrun_operator.providers.queue_answers import name_of
from rlrun_operator.reconcile.cache_feed import Feed
from rlrun_operator.reconcile.external_queue import ExternalQueue
from rlrun_operator.reconcile.observe import LookUps
from rlrun_operator.reconcile.queue_objects import STALE_SECONDS, Cluster
from rlrun_operator.reconcile.queues import queue_of
from rlrun_operator.reconcile.volcano_queue import READ_SECONDS, VolcanoAdapter
from rlrun_operator.runtime.cache import Key, Store
from rlrun_operator.settings import QueueSettings, RenderSettings, from_environment
from rlrun_operator.state import Admission, Refusal
from tests.unit.operator.decide.kube import SMALLEST
from tests.unit.operator.edge.fake_api import FakeApi, Json, serve_api

VOLCANO = "/apis/scheduling.volcano.sh/v1beta1"
PLACE = f"{VOLCANO}/namespaces/team-a/podgroups"
NAME = name_of("a", "uid-a")
EVENTS = "/api/v1/namespaces/team-a/events"


class Bench:
    """Queue with an API server and one run `a`."""

    def __init__(self, api: FakeApi, client: Client, **settings: Any) -> None:
        self.api, self.store, self.time = api, Store(), 1000.0
        self.woken: list[Key] = []
        self.pauses: list[float] = []
        cluster = Cluster(
            client=client,
            store=self.store,
            feed=Feed(self.store, client, lambda key, seconds: self.woken.append(key)),
            look_ups=LookUps(client, read_nodes=False),
            namespaces=("team-a",),
            serves=lambda run: True,
            is_active=lambda: True,
            requeue=self._again,
            now=lambda: self.time,
            clock=lambda: self.time,
        )
        found = queue_of(cluster, QueueSettings(provider="volcano", **settings), RenderSettings(provider="volcano"))
        assert isinstance(found, ExternalQueue)
        assert isinstance(found.adapter, VolcanoAdapter)
        self.queue = found
        api.objects[f"{VOLCANO}/queues/team-a"] = {"status": {"state": "Open"}}

    def run(self, *, spec: Json | None = None, **status: Any) -> Json:
        metadata = {"name": "a", "namespace": "team-a", "uid": "uid-a", "generation": 1}
        metadata |= {"resourceVersion": str(self.api.version + 1000), "creationTimestamp": "2026-01-01T00:00:00Z"}
        document = {"apiVersion": "rlrun.io/v1alpha1", "kind": "RLRun", "metadata": metadata}
        document |= {"spec": {**SMALLEST, "queueName": "team-a"} | (spec or {}), "status": status}
        self.api.version += 1
        self.store.put(document, self.time)
        return document

    def _again(self, key: Key, seconds: float) -> None:
        self.woken.append(key)
        self.pauses.append(seconds)

    async def ask(self, run: Json) -> Admission:
        self.time += STALE_SECONDS + READ_SECONDS
        answer = await self.queue.answer(run)
        assert answer is not None
        return answer

    def group(self) -> Json:
        return self.api.objects[f"{PLACE}/{NAME}"]

    def set_phase(self, phase: str) -> None:
        self.api._store(f"{PLACE}/{NAME}", {**self.group(), "status": {"phase": phase}})


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    api = FakeApi()
    async with serve_api(api) as client:
        yield Bench(api, client)


def make_recorded_status() -> Json:
    when = "2026-01-01T00:00:00Z"
    said = {"type": "Admitted", "status": "True", "reason": "RoomFound", "message": "", "lastTransitionTime": when}
    return {"phase": "Running", "attempt": 1, "launchedAttempt": 1, "conditions": [said]}


async def test_run_gets_one_group_and_starts_when_inqueue(bench: Bench) -> None:
    run = bench.run()
    first = await bench.ask(run)
    assert (first.admitted, first.reason) == (False, "WaitingForTurn")
    assert f"Volcano has not processed PodGroup {NAME} yet" in first.message
    bench.set_phase("Pending")
    await bench.ask(run)
    assert [verb for verb, path in bench.api.writes() if path.endswith("podgroups")] == ["create"]
    bench.set_phase("Inqueue")
    answer = await bench.ask(run)
    assert (answer.admitted, answer.message) == (True, f"Volcano Queue team-a: PodGroup {NAME} is Inqueue")
    for role in (*ROLES, SPOT_SET):
        marks = {"scheduling.k8s.io/group-name": NAME, "volcano.sh/task-spec": role}
        assert (answer.placed[role].scheduler, answer.placed[role].annotations) == ("volcano", marks)


@pytest.mark.parametrize(
    ("spec", "name", "queue"),
    [({"queueName": None}, "", "default"), ({"queueName": None}, "spare", "spare"), ({}, "spare", "team-a")],
    ids=["none", "the chart's", "its own"],
)
async def test_run_is_in_its_named_queue(spec: Json, name: str, queue: str) -> None:
    api = FakeApi()
    async with serve_api(api) as client:
        bench = Bench(api, client, name=name)
        await bench.ask(bench.run(spec=spec))
        assert bench.group()["spec"]["queue"] == queue


async def test_pending_group_reports_the_event_of_volcano(bench: Bench) -> None:
    run = bench.run()
    await bench.ask(run)
    bench.set_phase("Pending")
    about = {"kind": "PodGroup", "name": NAME, "uid": bench.group()["metadata"]["uid"]}

    def event(number: int, message: str, uid: str | None = None) -> None:
        subject = {**about, "uid": uid} if uid else about
        when = f"2026-01-01T00:00:0{number}Z"
        said = {"reason": "Unschedulable", "message": message, "involvedObject": subject, "lastTimestamp": when}
        bench.api.seed(f"{EVENTS}/e{number}", said)

    event(1, "resource in cluster is overused: overused cpu")
    event(2, "queue resource quota insufficient: insufficient nvidia.com/gpu")
    event(3, "0/0 tasks in gang unschedulable: pod group is not ready, 3 minAvailable")
    event(4, "of a group of this name that is gone", "another")
    answer = await bench.ask(run)
    assert (answer.reason, answer.message) == (
        "WaitingForResources",
        f"Volcano Queue team-a: PodGroup {NAME} is Pending: queue resource quota insufficient: insufficient nvidia.com/gpu; "
        "it needs 1 trainer, 1 inference, 1 orchestrator",
    )


async def test_missing_or_unreadable_queue_is_reported(bench: Bench) -> None:
    run = bench.run(spec={"queueName": "nobody"})
    answer = await bench.ask(run)
    assert answer.reason == "QueueMisconfigured"
    assert answer.message.startswith(
        "Volcano Queue nobody: Volcano has no such Queue; name another one in spec.queueName"
    )
    refusal = (403, "Forbidden", 'User "x" cannot get resource "queues"')
    bench.api.hook = lambda verb, path, body: refusal if "/queues/" in path else None
    answer = await bench.ask(run)
    assert answer.reason == "WaitingForTurn"
    assert "Does the Queue exist? This operator may not read Queues" in answer.message


async def test_missing_volcano_blocks_only_new_runs(bench: Bench) -> None:
    bench.api.hook = lambda verb, path, body: (404, "NotFound", "page not found") if "volcano" in path else None
    answer = await bench.ask(bench.run())
    assert (answer.reason, answer.admitted) == ("QueueUnavailable", False)
    assert answer.message.startswith(
        "Volcano is not installed: the cluster does not serve podgroups.scheduling.volcano.sh/v1beta1; install it, or set"
    )
    kept = await bench.ask(bench.run(**make_recorded_status()))
    assert (kept.admitted, kept.placed["trainer"].scheduler) == (True, "volcano")
    assert "Volcano is not installed" in kept.message


async def test_missing_right_is_reported(bench: Bench) -> None:
    message = 'User "x" cannot list resource "podgroups"'
    bench.api.hook = lambda verb, path, body: (403, "Forbidden", message) if verb == "list" else None
    answer = await bench.ask(bench.run())
    assert answer.message == (
        f"Volcano's PodGroups may not be read: {message}; a helm upgrade of the operator's chart grants it"
    )


@pytest.mark.parametrize(
    ("status", "words", "fix"),
    [
        (
            500,
            'admission webhook "validatepodgroup.volcano.sh" denied the request: unable to find queue',
            "change the policy or webhook that refuses it; the operator retries",
        ),
        (
            403,
            'User "sa" cannot create resource "podgroups"',
            "a helm upgrade of its chart grants it; the operator retries",
        ),
    ],
)
async def test_refused_group_is_reported_with_fix_and_retried(bench: Bench, status: int, words: str, fix: str) -> None:
    bench.api.hook = lambda verb, path, body: (status, "Reason", words) if verb == "create" else None
    answer = await bench.ask(bench.run())
    assert (answer.reason, words in answer.message) == ("QueueUnavailable", True)
    assert answer.message.endswith(fix)
    assert ("team-a", "a") in bench.woken
    bench.api.hook = lambda verb, path, body: None
    await bench.ask(bench.run())
    assert bench.group()["spec"]["minMember"] == 3


async def test_earlier_run_and_guest_are_unchanged(bench: Bench) -> None:
    before = bench.run(phase="Running", attempt=1, launchedAttempt=1)
    assert await bench.queue.answer(before) is None
    guest = bench.run(spec={"trainer": {"sharedWith": "host"}})
    assert await bench.queue.answer(guest) is None
    assert bench.api.writes() == []


async def test_foreign_group_is_kept_and_reported(bench: Bench) -> None:
    labels = {"rlrun.io/run": "a"}
    bench.api.seed(f"{PLACE}/{NAME}", {"kind": "PodGroup", "metadata": {"labels": labels}, "spec": {"minMember": 1}})
    answer = await bench.ask(bench.run())
    assert (answer.reason, bench.group()["spec"]) == ("QueueUnavailable", {"minMember": 1})
    assert answer.message == f"Volcano Queue team-a: PodGroup {NAME} exists and belongs to another owner; delete it"


def test_volcano_provider_is_read_from_settings() -> None:
    told = from_environment({"RLRUN_QUEUE": '{"provider": "volcano", "name": "spare"}'})
    assert (told.queue.kind, told.render.provider, told.queue.name) == ("volcano", "volcano", "spare")


async def test_refused_group_deletion_is_reported_with_growing_delays(bench: Bench) -> None:
    await bench.ask(bench.run())
    words = "ValidatingAdmissionPolicy 'keep' with binding 'all' denied request: groups stay"
    bench.api.hook = lambda verb, path, body: (422, "Invalid", words) if verb == "delete" else None
    over = bench.run(phase="Complete", attempt=1, launchedAttempt=1)
    for pause in (10.0, 20.0, 40.0, 60.0, 60.0):
        answer = await bench.ask(over)
        assert answer.refused == (Refusal(Ref("PodGroup", NAME), words, "be deleted"),)
        assert bench.pauses[-1] == pause
    bench.api.hook = lambda verb, path, body: None
    assert (await bench.ask(over)).refused == ()
    assert f"{PLACE}/{NAME}" not in bench.api.objects


async def test_unavailable_api_server_is_not_a_refusal(bench: Bench) -> None:
    await bench.ask(bench.run())
    bench.api.hook = lambda verb, path, body: (503, "Unavailable", "away") if verb == "delete" else None
    assert (await bench.ask(bench.run(phase="Complete", attempt=1, launchedAttempt=1))).refused == ()
