"""A run queued by Volcano on a real API server, from a missing installation to completion."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

import pytest

from tests.cluster import Cluster
from tests.controlplane import volcano
from tests.controlplane.harness import Kube, OperatorProcess, wait_for
from tests.controlplane.world import CORE, World
from tests.support.volcano import StandIn

SMALL = {"trainer": {"gpusPerReplica": 0}, "inference": {"gpusPerReplica": 0}}


@pytest.fixture(scope="module")
def operator_settings() -> Mapping[str, str]:
    """Settings with Volcano, which is not installed when the operator starts."""
    return {"RLRUN_QUEUE": json.dumps({"provider": "volcano"})}


@pytest.fixture(scope="module", autouse=True)
def uninstalled(cluster: Cluster, operator: OperatorProcess) -> Iterator[None]:
    """Remove Volcano at the end."""
    yield
    volcano.uninstall(Kube(cluster.kubeconfig))


def no_pods(world: World) -> bool:
    return world.kube.items(world.path(CORE, "pods")) == []


def test_run_follows_volcano_from_queue_to_completion(world: World, nodes: tuple[str, ...]) -> None:
    world.create("a", queueName="team-a", **SMALL)
    status = world.wait_phase("a", "Queued")
    assert status["reason"] == "QueueUnavailable"
    assert "does not serve podgroups.scheduling.volcano.sh/v1beta1" in status["message"]
    volcano.install(world.kube, "team-a", "default")
    stand_in = StandIn(rooms=0, nodes=0)
    with volcano.Scheduler(world, stand_in, nodes[0]).at_work() as scheduler:
        status = world.wait_told("a", r"Volcano Queue team-a: PodGroup \S+ is Pending: it needs 1 trainer, 1 inference")
        assert (status["phase"], no_pods(world)) == ("Queued", True)
        (group,) = scheduler.groups()
        assert group["spec"]["minTaskMember"] == {"trainer": 1, "inference": 1, "orchestrator": 1}

        stand_in.rooms = 1
        world.wait_phase("a", "Starting")
        wait_for(
            lambda: world.condition("a", "Admitted")["message"],
            lambda said: "is Inqueue: 3/3 tasks in gang unschedulable (NotEnoughResources)" in said,
            "why the pods have no nodes is told",
        )
        stand_in.nodes = 3
        world.wait_pods_ready("a", 2)
        world.renew("a", 7, checkpoint_step=7)
        world.wait_phase("a", "Running")
        wait_for(lambda: world.condition("a", "Admitted")["message"], lambda said: "is Running" in said, "it runs")

        world.edit("a", {"suspend": True})
        world.wait_phase("a", "Suspended")
        wait_for(scheduler.groups, lambda found: found == [], "a suspended run holds no room")
        world.edit("a", {"suspend": False})
        world.wait_phase("a", "Starting", attempt=2)
        world.wait_pods_ready("a", 2)
        world.renew("a", 100, attempt=2, resumed_from_step=7, checkpoint_step=100)
        world.wait_phase("a", "Running")
        world.end_pod("a-orchestrator-2", 0)
        world.wait_phase("a", "Complete")
        wait_for(scheduler.groups, lambda found: found == [], "a run that has ended holds no room")


@pytest.mark.full
def test_run_with_unknown_queue_moves_to_existing_queue(world: World, nodes: tuple[str, ...]) -> None:
    with volcano.Scheduler(world, StandIn(), nodes[0]).at_work() as scheduler:
        world.create("b", queueName="nobody", **SMALL)
        status = world.wait_told("b", "Volcano has no such Queue")
        assert (status["phase"], status["reason"]) == ("Queued", "QueueMisconfigured")
        world.edit("b", {"queueName": "default"})
        world.wait_phase("b", "Starting")
        assert [group["spec"]["queue"] for group in scheduler.groups()] == ["default"]
