"""Queue edge: one plan from runs, pods and nodes, which every pass over a run reads."""

from __future__ import annotations

from typing import Any

import pytest

from rlrun_operator.names import ATTEMPT_LABEL, ROLE_LABEL, RUN_LABEL, RUN_UID_ANNOTATION
from rlrun_operator.reconcile.admissions import FREE, OUT, Admissions, rules_of
from rlrun_operator.runtime.cache import Key, Store
from rlrun_operator.settings import QueueSettings, RenderSettings, SettingsError, from_environment
from rlrun_operator.state import Admission
from rlrun_operator.times import format_rfc3339
from tests.unit.operator.decide.kube import SMALLEST
from tests.unit.operator.decisions import scripted_decision
from tests.unit.operator.edge.fake_api import FakeApi, serve_api
from tests.unit.operator.edge.test_reconcile import Bench

EPOCH = 1_700_000_000.0
GPU = "nvidia.com/gpu"


class Cluster:
    """Nodes, foreign pods and the operator's store of runs."""

    def __init__(self, gpus: int, **settings: Any) -> None:
        self.store = Store()
        self.time = EPOCH
        self.offset = 0.0
        """Adjustment of the wall clock in seconds."""
        self.woken: list[Key] = []
        self.nodes: tuple[Any, ...] | None = tuple(make_node(f"node-{i}") for i in range(gpus // 8)) if gpus else None
        self.pods: tuple[Any, ...] = ()
        self.limited: list[Any] = []
        """ResourceQuotas."""
        self.classes: dict[str, int | str] = {}
        """Value of each PriorityClass, or the error of reading it."""
        self.asked = 0
        self.admissions = Admissions(
            self.store,
            self,  # type: ignore[arg-type]
            QueueSettings(enabled=True, **settings),
            RenderSettings(),
            serves=lambda run: run["spec"].get("managedBy") is None,
            requeue=lambda key, seconds: self.woken.append(key),
            now=lambda: self.time + self.offset,
            clock=lambda: self.time,
        )

    async def quotas(self, namespaces: set[str]) -> dict[str, Any]:
        return dict.fromkeys(namespaces, self.limited)

    async def read_priorities(self, names: set[str]) -> dict[str, int | str]:
        return {name: self.classes[name] for name in names}

    async def nodes_and_pods(self) -> tuple[Any, Any]:
        self.asked += 1
        return self.nodes, self.pods if self.nodes is not None else None

    def run(self, name: str, *, replicas: int = 1, spec: dict[str, Any] | None = None, **status: Any) -> dict[str, Any]:
        trainer = {"replicas": replicas, "gpusPerReplica": 8, **(spec or {}).pop("trainer", {})}
        document = {
            "apiVersion": "rlrun.io/v1alpha1",
            "kind": "RLRun",
            "metadata": {
                "name": name,
                "namespace": "team-a",
                "uid": f"uid-{name}",
                "resourceVersion": str(int(self.time) + len(self.store.runs())),
                "generation": 1,
                "creationTimestamp": format_rfc3339(self.time),
            },
            "spec": SMALLEST | {"trainer": trainer, "inference": {"gpusPerReplica": 0}} | (spec or {}),
        }
        if status:
            document["status"] = status
        self.store.put(document, self.time)
        return document

    def steps(self, seconds: float) -> None:
        """Pass time."""
        self.time += seconds

    async def ask(self, run: dict[str, Any]) -> Admission:
        self.time += 1.0
        return await self.admissions.answer(run)


def make_node(name: str, gpus: int = 8) -> dict[str, Any]:
    has = {GPU: str(gpus), "cpu": "96", "memory": "1Ti", "pods": "110"}
    return {
        "metadata": {"name": name, "labels": {"kubernetes.io/hostname": name}},
        "spec": {},
        "status": {"allocatable": has, "conditions": [{"type": "Ready", "status": "True"}]},
    }


def make_foreign_pod(on: str, gpus: int) -> dict[str, Any]:
    container = {"resources": {"limits": {GPU: str(gpus)}}}
    return {
        "metadata": {"name": "x", "namespace": "others"},
        "spec": {"nodeName": on, "containers": [container]},
        "status": {"phase": "Running"},
    }


def make_pod(run: dict[str, Any], role: str, on: str, *, gpus: int) -> dict[str, Any]:
    container = {"resources": {"limits": {GPU: str(gpus)}}}
    name = run["metadata"]["name"]
    return {
        "kind": "Pod",
        "metadata": {
            "name": f"{name}-{role}-0",
            "namespace": "team-a",
            "uid": f"uid-{name}-{role}-0",
            "resourceVersion": "1",
            "creationTimestamp": run["metadata"]["creationTimestamp"],
            "annotations": {RUN_UID_ANNOTATION: run["metadata"]["uid"]},
            "labels": {RUN_LABEL: name, ROLE_LABEL: role, ATTEMPT_LABEL: "1"},
        },
        "spec": {"nodeName": on, "containers": [container]},
        "status": {"phase": "Running"},
    }


def make_admitted_status(since: float = EPOCH) -> dict[str, Any]:
    condition = {
        "type": "Admitted",
        "status": "True",
        "reason": "RoomFound",
        "message": "",
        "lastTransitionTime": format_rfc3339(since),
    }
    return {"phase": "Running", "attempt": 1, "launchedAttempt": 1, "conditions": [condition]}


async def test_run_is_admitted_only_if_all_roles_fit() -> None:
    cluster = Cluster(16)
    cluster.pods = (make_foreign_pod("node-1", 5),)
    answer = await cluster.ask(cluster.run("a", replicas=2))
    assert not answer.admitted
    assert answer.message == f"trainer needs 2 nodes with 8 free {GPU} each; 1 qualifies (node-1: 3 free)"
    cluster.pods = ()
    assert (await cluster.ask(cluster.store.runs()[0])).admitted  # type: ignore[arg-type]


async def test_quota_limits_the_admission() -> None:
    cluster = Cluster(16)
    hard, used = {"requests.nvidia.com/gpu": "8", "count/pods": "50"}, {"requests.nvidia.com/gpu": "4"}
    quota = {"metadata": {"name": "team"}, "spec": {"hard": hard}, "status": {"hard": hard, "used": used}}
    cluster.limited = [quota]
    run = cluster.run("a")
    answer = await cluster.ask(run)
    assert (answer.admitted, answer.reason) == (False, "WaitingForResources")
    words = "quota team: requests.nvidia.com/gpu: requested 8, used 4 of 8; free some of it, or have the quota raised"
    assert answer.message == words
    cluster.limited = [{**quota, "spec": {"hard": hard, "scopes": ["Terminating"]}}]
    assert (await cluster.ask(run)).admitted, "it counts none of the run's pods"


async def test_admission_counts_before_it_is_recorded() -> None:
    cluster = Cluster(8)
    first, second = cluster.run("a"), cluster.run("b")
    assert (await cluster.ask(first)).admitted
    answer = await cluster.ask(second)
    assert (answer.admitted, answer.position, answer.waiting) == (False, 1, 1)


async def test_recorded_admission_survives_the_operator() -> None:
    cluster = Cluster(8)
    cluster.run("a", **make_admitted_status())
    other = cluster.run("b")
    assert not (await cluster.ask(other)).admitted, "the first run's pods are not made yet, and have their room"


async def test_run_from_before_the_queue_keeps_its_room() -> None:
    cluster = Cluster(8)
    old = cluster.run("old", phase="Running", attempt=1, launchedAttempt=1)
    assert not (await cluster.ask(cluster.run("new"))).admitted, "no pod of the older run exists between two attempts"
    assert (await cluster.ask(old)).admitted


async def test_preempted_run_keeps_its_first_arrival() -> None:
    """docs/queueing.md: a preempted run continues in its turn."""
    cluster = Cluster(8)
    holder = cluster.run("holder", **make_admitted_status())
    arrived = {"queue": {"since": format_rfc3339(EPOCH - 3600.0)}, "attempt": 1, "launchedAttempt": 1}
    preempted = {"type": "Admitted", "status": "False", "reason": "Preempted", "message": ""}
    old = cluster.run(
        "old", phase="Queued", conditions=[preempted | {"lastTransitionTime": format_rfc3339(EPOCH)}], **arrived
    )
    cluster.steps(60.0)
    new = cluster.run("new")
    assert not (await cluster.ask(holder)).stops
    assert [(await cluster.ask(run)).position for run in (old, new)] == [1, 2]


async def test_higher_priority_preempts_and_wakes_a_lower_run() -> None:
    cluster = Cluster(8)
    low = cluster.run("low", **make_admitted_status())
    assert (await cluster.ask(low)).admitted
    cluster.woken.clear()
    high = cluster.run("high", spec={"priority": 10})
    assert not (await cluster.ask(high)).admitted
    answer = await cluster.ask(low)
    assert (answer.stops, answer.reason) == (True, "Preempted")
    assert ("team-a", "low") in cluster.woken


async def test_priority_class_sets_the_priority() -> None:
    cluster = Cluster(8, priority_classes={"urgent": 10})
    cluster.run("low", **make_admitted_status())
    await cluster.ask(cluster.run("high", spec={"trainer": {"priorityClassName": "urgent"}}))
    assert (await cluster.ask(cluster.store.runs()[0])).stops  # type: ignore[arg-type]


async def test_priority_of_the_specification_wins_over_the_priority_class() -> None:
    cluster = Cluster(8, priority_classes={"urgent": 10})
    low = cluster.run("low", spec={"priority": 5}, **make_admitted_status())
    await cluster.ask(cluster.run("high", spec={"priority": 1, "trainer": {"priorityClassName": "urgent"}}))
    assert not (await cluster.ask(low)).stops


async def test_unknown_priority_class_is_read_from_the_cluster() -> None:
    cluster = Cluster(8, priority_classes={"urgent": -10})
    cluster.classes = {"high": 100000}
    low = cluster.run("low", **make_admitted_status())
    await cluster.ask(cluster.run("urgent", spec={"trainer": {"priorityClassName": "urgent"}}))
    assert not (await cluster.ask(low)).stops
    cluster.run("high", spec={"trainer": {"priorityClassName": "high"}})
    assert (await cluster.ask(low)).stops


async def test_unreadable_priority_class_counts_as_0_and_is_reported() -> None:
    cluster = Cluster(8)
    cluster.classes = {"gone": "does not exist; have it made, or name another one"}
    cluster.run("low", **make_admitted_status())
    answer = await cluster.ask(cluster.run("high", spec={"trainer": {"priorityClassName": "gone"}}))
    assert (answer.admitted, answer.position) == (False, 1)
    assert answer.message.endswith(
        "; its priority counts as 0: PriorityClass gone does not exist; have it made, or name another one"
    )
    answer = await cluster.ask(cluster.run("numbered", spec={"priority": 1, "trainer": {"priorityClassName": "gone"}}))
    assert "counts as 0" not in answer.message


async def test_configured_capacity_replaces_unreadable_nodes() -> None:
    cluster = Cluster(0, capacity={GPU: 12})
    assert (await cluster.ask(cluster.run("a"))).admitted
    answer = await cluster.ask(cluster.run("b"))
    assert (answer.admitted, answer.message) == (
        False,
        f"trainer needs 1 place with 8 free {GPU}; 0 qualify (the cluster: 4 free)",
    )
    assert cluster.asked == 0


async def test_queue_without_capacity_starts_one_run_at_a_time() -> None:
    cluster = Cluster(0)
    assert (await cluster.ask(cluster.run("a"))).admitted
    assert (await cluster.ask(cluster.run("b"))).reason == "WaitingForTurn"


async def test_deleted_run_holds_room_until_pods_are_gone() -> None:
    cluster = Cluster(0, capacity={GPU: 8})
    run = cluster.run("a", **make_admitted_status())
    cluster.store.put(make_pod(run, "trainer", "node-0", gpus=8), cluster.time)
    run["metadata"] |= {
        "deletionTimestamp": format_rfc3339(cluster.time),
        "resourceVersion": str(int(cluster.time) + 100),
    }
    cluster.store.put(run, cluster.time)
    assert not (await cluster.ask(cluster.run("b"))).admitted


FAILED = {
    "type": "Failed",
    "status": "True",
    "reason": "PermanentFailure",
    "message": "",
    "lastTransitionTime": format_rfc3339(EPOCH),
}


@pytest.mark.parametrize(
    ("spec", "status"),
    [
        ({"suspend": True}, {}),
        ({}, {"phase": "Failed", "conditions": [FAILED]}),
        ({"managedBy": "another"}, {}),
        ({"maxSteps": -1}, {}),
    ],
    ids=["suspended", "over", "of another operator", "invalid"],
)
async def test_run_without_need_of_room_is_not_queued(spec: dict[str, Any], status: dict[str, Any]) -> None:
    cluster = Cluster(8)
    assert await cluster.ask(cluster.run("a", spec=spec, **status)) is OUT
    assert (await cluster.ask(cluster.run("b"))).admitted


@pytest.mark.parametrize(("min_available", "keeps"), [(1, True), (2, False)])
async def test_run_is_released_without_min_available_engines(min_available: int, keeps: bool) -> None:
    cluster = Cluster(16)
    engines = {"replicas": 2, "gpusPerReplica": 8, "tensorParallel": 8, "minAvailable": min_available}
    run = cluster.run("a", spec={"inference": engines}, **make_admitted_status())
    for role, on in (("trainer", "node-0"), ("inference", "node-1"), ("orchestrator", "node-0")):
        cluster.store.put(make_pod(run, role, on, gpus=0 if role == "orchestrator" else 8), cluster.time)
    assert (await cluster.ask(run)).admitted
    cluster.steps(3600.0)
    assert (await cluster.ask(run)).admitted == keeps


async def test_guest_starts_without_room_of_its_own() -> None:
    cluster = Cluster(8)
    cluster.run("host", **make_admitted_status())
    guest = cluster.run("guest", spec={"trainer": {"sharedWith": "host"}})
    assert await cluster.ask(guest) is FREE


async def test_run_newer_than_the_plan_waits_for_next_plan() -> None:
    cluster = Cluster(16)
    assert (await cluster.ask(cluster.run("a"))).admitted
    answer = await cluster.admissions.answer(cluster.run("b"))
    assert (answer.admitted, answer.reason) == (False, "WaitingForTurn")
    assert cluster.woken[-1] == ("team-a", "b"), "it is looked at again as soon as there is another plan"


async def test_clock_set_back_does_not_keep_a_run_waiting() -> None:
    cluster = Cluster(0)
    first = cluster.run("a")
    assert (await cluster.ask(first)).admitted
    cluster.run("a", **make_admitted_status(cluster.time))
    cluster.steps(601.0)
    assert (await cluster.ask(cluster.store.runs()[0])).reason == "Released"  # type: ignore[arg-type]
    cluster.offset = -86400.0
    cluster.run("a")
    cluster.steps(1.0)
    assert (await cluster.ask(cluster.store.runs()[0])).reason == "BackingOff"  # type: ignore[arg-type]
    cluster.steps(60.0)
    assert (await cluster.ask(cluster.store.runs()[0])).admitted  # type: ignore[arg-type]


async def test_reconcile_pass_reads_the_admission() -> None:
    api = FakeApi()
    async with serve_api(api) as client:
        bench = Bench(api, client, lambda observed: scripted_decision(status={"phase": "Queued"}))
        await bench.go()
        assert bench.seen[-1].admission is None, "no queue"
        bench.reconciler._queue = Answers()  # type: ignore[assignment]
        await bench.go()
    assert bench.seen[-1].admission is OUT


class Answers:
    """Queue with a constant answer."""

    async def answer(self, run: dict[str, Any]) -> Admission:
        return OUT


def test_invalid_queue_setting_is_reported_with_its_place() -> None:
    with pytest.raises(SettingsError, match=r"RLRUN_QUEUE weights.team-a \(-1\).*correct queue in the chart's values"):
        from_environment({"RLRUN_QUEUE": '{"enabled": true, "weights": {"team-a": -1}}'})


def test_queue_settings_reach_the_rules() -> None:
    """A missing setting would silently keep its default."""
    given = {
        "weights": {"team-a": 4.0},
        "preemption": "Never",
        "pass_seconds": 1.0,
        "reserve_seconds": 2.0,
        "start_seconds": 3.0,
    }
    rules = rules_of(QueueSettings(**given))
    assert {name: getattr(rules, name) for name in given} == given


async def test_plan_is_shared_by_a_burst_of_passes() -> None:
    cluster = Cluster(8)
    run = cluster.run("a")
    await cluster.ask(run)
    await cluster.admissions.answer(run)
    assert cluster.asked == 1
