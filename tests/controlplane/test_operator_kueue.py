"""A run queued by Kueue on a real API server, from a missing installation over an eviction to completion."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

import pytest

from tests.cluster import Cluster
from tests.controlplane import kueue
from tests.controlplane.harness import Kube, OperatorProcess, wait_for
from tests.controlplane.world import APPS, CORE, World
from tests.support.kueue import StandIn, is_true

QUEUE = {
    "provider": "kueue",
    "name": "default",
    "flavors": {
        "h100": {"nodeLabels": {"kubernetes.io/os": "linux"}},
        "a100": {"nodeLabels": {"kubernetes.io/arch": "amd64"}, "tolerations": [{"key": "gpu", "operator": "Exists"}]},
    },
}
SMALL = {"trainer": {"gpusPerReplica": 0}, "inference": {"gpusPerReplica": 0}}


@pytest.fixture(scope="module")
def operator_settings() -> Mapping[str, str]:
    """Settings with Kueue, which is not installed when the operator starts."""
    return {"RLRUN_QUEUE": json.dumps(QUEUE)}


@pytest.fixture(scope="module", autouse=True)
def uninstalled(cluster: Cluster, operator: OperatorProcess) -> Iterator[None]:
    """Remove Kueue at the end."""
    yield
    kueue.uninstall(Kube(cluster.kubeconfig))


def no_pods(world: World) -> bool:
    return world.kube.items(world.path(CORE, "pods")) == []


def test_run_is_queued_evicted_and_readmitted_by_kueue(world: World) -> None:
    world.create("a", queueName="team-a", **SMALL)
    status = world.wait_phase("a", "Queued")
    assert status["reason"] == "QueueUnavailable"
    assert "Kueue is not installed: the cluster does not serve workloads.kueue.x-k8s.io/v1beta2" in status["message"]
    kueue.install(world.kube)
    stand_in = StandIn(rooms=0)
    with kueue.Controller(world, stand_in).at_work() as controller:
        status = world.wait_told("a", r"LocalQueue team-a: insufficient unused quota .* \(WaitingForQuota\)")
        assert (status["phase"], status["reason"]) == ("Queued", "WaitingForResources")
        assert no_pods(world)
        sets = controller.workload()["spec"]["podSets"]
        assert [(one["name"], one["count"]) for one in sets] == [("trainer", 1), ("inference", 1), ("orchestrator", 1)]

        stand_in.rooms = 1
        world.wait_phase("a", "Starting")
        world.wait_pods_ready("a", 2)
        world.renew("a", 7, checkpoint_step=7)
        world.wait_phase("a", "Running")
        wait_for(lambda: controller.workload(), lambda one: is_true(one, "PodsReady"), "the Workload says PodsReady")
        template = world.kube("GET", world.path(APPS, "statefulsets", "a-trainer"))["spec"]["template"]
        assert template["spec"]["nodeSelector"] == {"kubernetes.io/os": "linux"}
        assert template["metadata"]["labels"]["kueue.x-k8s.io/podset"] == "trainer"

        stand_in.rooms, stand_in.flavor = 0, "a100"
        controller.does(stand_in.time_out)
        world.wait_told("a", "retries at")
        status = world.wait_phase("a", "Queued")
        assert (status["reason"], no_pods(world)) == ("BackingOff", True)
        assert "admission" not in controller.workload()["status"]

        stand_in.rooms = 1
        controller.does(stand_in.end_backoff)
        world.wait_phase("a", "Starting", attempt=2)
        world.wait_pods_ready("a", 2)
        world.renew("a", 100, attempt=2, resumed_from_step=7, checkpoint_step=100)
        status = world.wait_phase("a", "Running")
        assert (status["restarts"], status["checkpoint"]["stepsLostTotal"]) == (0, 0)
        pod = world.kube("GET", world.path(CORE, "pods", "a-orchestrator-2"))
        assert pod["spec"]["nodeSelector"] == {"kubernetes.io/arch": "amd64"}

        world.end_pod("a-orchestrator-2", 0)
        world.wait_phase("a", "Complete")
        wait_for(lambda: controller.workload(), lambda one: is_true(one, "Finished"), "the Workload is finished")


@pytest.mark.full
def test_run_with_unknown_queue_moves_to_existing_queue(world: World) -> None:
    with kueue.Controller(world, StandIn()).at_work() as controller:
        world.create("b", **SMALL)
        status = world.wait_told("b", "LocalQueue default doesn't exist")
        assert (status["phase"], status["reason"]) == ("Queued", "QueueMisconfigured")
        world.edit("b", {"queueName": "team-a"})
        world.wait_phase("b", "Starting")
        assert len(controller.workloads()) == 1


@pytest.mark.full
def test_operator_killed_during_preemption_completes_it(world: World, operator: OperatorProcess) -> None:
    stand_in = StandIn()
    with kueue.Controller(world, stand_in).at_work() as controller:
        world.start("d", step=3, queueName="team-a", **SMALL)
        stand_in.rooms = 0
        controller.does(stand_in.preempt)
        wait_for(lambda: world.status("d"), lambda s: s["phase"] in ("Suspending", "Queued"), "run d gives way")
        operator.kill()
        operator.start()
        world.wait_told("d", "WaitingForQuota")
        assert (no_pods(world), len(controller.workloads())) == (True, 1)
        stand_in.rooms = 1
        world.wait_phase("d", "Starting", attempt=2)
