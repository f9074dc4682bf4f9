"""Two runs with room for one, through the operator's own queue."""

from __future__ import annotations

from random import Random
from typing import Any

from rlrun_operator.decide.state_machine import decide
from rlrun_operator.kube.client import Client
from rlrun_operator.reconcile.admissions import Admissions
from rlrun_operator.reconcile.observe import LookUps
from rlrun_operator.reconcile.reconciler import Dependencies, Reconciler
from rlrun_operator.runtime.cache import Key, Store
from rlrun_operator.runtime.event_recorder import Poster
from rlrun_operator.runtime.metrics import Metrics
from rlrun_operator.settings import QueueSettings, RenderSettings
from tests.unit.operator.decide.kube import SMALLEST
from tests.unit.operator.edge.fake_api import FakeApi, serve_api

GPU = "nvidia.com/gpu"
ROUNDS = 12


class Operator:
    """Operator that makes passes over runs like the work queue."""

    def __init__(self, api: FakeApi, client: Client) -> None:
        self.api = api
        self.time = 1_700_000_000.0
        self.store = Store()
        self.metrics = Metrics(self.store)
        self.asked: list[Key] = []
        look_ups = LookUps(client, read_nodes=False, clock=self._clock)
        admissions = Admissions(
            self.store,
            look_ups,
            QueueSettings(enabled=True, capacity={GPU: 8}),
            RenderSettings(),
            serves=lambda run: True,
            requeue=lambda key, seconds: self.asked.append(key),
            now=self._clock,
            clock=self._clock,
        )
        poster = Poster(client, "operator-0", clock=self._clock)
        self.reconciler = Reconciler(
            decide=decide,
            outside=Dependencies(client, self.store, look_ups, poster, self.metrics, admissions),
            settings=RenderSettings(),
            requeue=lambda key, seconds: self.asked.append(key),
            now=self._clock,
            clock=self._clock,
            random=Random(0),
        )

    def _clock(self) -> float:
        return self.time

    def create(self, name: str, priority: int = 0) -> None:
        spec = (
            SMALLEST | {"priority": priority} | {"trainer": {"gpusPerReplica": 8}, "inference": {"gpusPerReplica": 0}}
        )
        document = {"apiVersion": "rlrun.io/v1alpha1", "kind": "RLRun", "metadata": {}, "spec": spec}
        self.store.put(self.api.seed(f"/apis/rlrun.io/v1alpha1/namespaces/ns/rlruns/{name}", document), self.time)

    def status(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = self.api.objects[f"/apis/rlrun.io/v1alpha1/namespaces/ns/rlruns/{name}"]
        return dict(found.get("status") or {})

    def workloads(self, name: str) -> list[str]:
        kinds = ("/statefulsets/", "/deployments/", "/pods/")
        return [path for path in self.api.objects if f"/{name}-" in path and any(kind in path for kind in kinds)]

    def controller_makes_the_trainers_pod(self, name: str) -> None:
        path = next(path for path in self.workloads(name) if "/statefulsets/" in path)
        template = self.api.objects[path]["spec"]["template"]
        metadata = template["metadata"] | {"name": f"{name}-trainer-0", "namespace": "ns"}
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"] | {"nodeName": "n"}}
        made = self.api.seed(f"/api/v1/namespaces/ns/pods/{name}-trainer-0", pod)
        self.store.put(made, self.time)

    async def work(self, *names: str) -> None:
        for _ in range(ROUNDS):
            for name in names:
                self.time += 1.0
                await self.reconciler.reconcile(("ns", name))


async def test_first_run_starts_completely_and_second_waits() -> None:
    api = FakeApi()
    async with serve_api(api) as client:
        operator = Operator(api, client)
        operator.create("a")
        operator.create("b")
        await operator.work("a", "b")
        assert (operator.status("a")["attempt"], len(operator.workloads("a"))) == (1, 3)
        waits = operator.status("b")
        assert (waits["phase"], waits["attempt"], operator.workloads("b")) == ("Queued", 0, [])
        need = f"trainer needs 1 place with 8 free {GPU}; 0 qualify (the cluster: 0 free)"
        assert waits["message"] == f"position 1 of 1: {need}"
        scraped = {s.name: s.value for family in operator.metrics.registry.collect() for s in family.samples}
        assert scraped["rlrun_queue_position"] == 1


async def test_higher_priority_waits_for_preempted_run_to_save() -> None:
    api = FakeApi()
    async with serve_api(api) as client:
        operator = Operator(api, client)
        operator.create("a")
        await operator.work("a")
        operator.controller_makes_the_trainers_pod("a")
        operator.create("urgent", priority=10)
        await operator.work("urgent", "a")
        ends = operator.status("a")
        assert (ends["phase"], ends["reason"]) == ("Suspending", "Preempted")
        assert "releases its resources to run ns/urgent, whose priority is 10" in ends["message"]
        assert (operator.status("urgent")["phase"], operator.workloads("urgent")) == ("Queued", [])
