"""An elastic trainer on a real control plane that loses a node and gets it back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.cluster import Cluster
from tests.controlplane.harness import wait_for
from tests.controlplane.installation import fake_nodes
from tests.controlplane.world import APPS, World

pytestmark = pytest.mark.full

HERE = {"elastic-trainer": "yes"}


@pytest.fixture(scope="module")
def nodes(cluster: Cluster) -> Iterator[tuple[str, ...]]:
    """Two nodes with room for one trainer pod each."""
    with fake_nodes(cluster, 2, prefix="elastic-trainer", labels=HERE) as names:
        yield names


def wait_size(world: World, pods: int, attempt: int) -> dict[str, Any]:
    """Wait until `pods` trainer pods are ready in this attempt; return the status."""
    status = wait_for(
        lambda: world.status("a"),
        lambda s: (s.get("attempt"), s.get("trainerReady")) == (attempt, f"{pods}/{pods}"),
        f"{pods} trainer pods in attempt {attempt}",
    )
    child = world.kube("GET", world.path(APPS, "statefulsets", "a-trainer"))["spec"]
    (container,) = child["template"]["spec"]["containers"]
    told = {variable["name"]: variable.get("value") for variable in container["env"]}
    assert (child["replicas"], told["RLRUN_NNODES"]) == (pods, str(pods))
    return status


def test_elastic_trainer_shrinks_and_grows_with_nodes(world: World, cluster: Cluster, nodes: tuple[str, ...]) -> None:
    elastic = {"min": 1, "waitSeconds": 3600, "growSeconds": 5}
    trainer = {"replicas": 2, "gpusPerReplica": 8, "elastic": elastic, "nodeSelector": HERE}
    world.create("a", trainer=trainer, checkpoint={"interval": 10})
    wait_size(world, 2, 1)
    world.renew("a", 12, checkpoint_step=10)
    world.wait_phase("a", "Running", attempt=1)

    lost = next(pod["spec"]["nodeName"] for pod in world.pods("a") if pod["metadata"]["name"] == "a-trainer-1")
    cluster.kubectl("drain", lost, "--ignore-daemonsets", "--delete-emptydir-data", "--force", "--timeout=60s")
    world.wait_phase("a", "Starting", attempt=2)
    world.edit("a", {"trainer": {"elastic": {"waitSeconds": 5}}})
    status = wait_size(world, 1, 3)
    world.edit("a", {"trainer": {"elastic": {"waitSeconds": 3600}}})  # long enough for any slow machine
    assert status["trainer"]["size"] == 1
    assert status["trainer"]["reason"] == "2 to 1 pod: 1 of 2 pods found no node within 5 s"
    assert status["restartsCountedTowardsMax"] == 0
    world.renew("a", 21, attempt=3, resumed_from_step=10, checkpoint_step=10)
    world.wait_phase("a", "Running", attempt=3)

    cluster.kubectl("uncordon", lost)

    def trains() -> dict[str, Any]:
        world.renew("a", 22, attempt=3, resumed_from_step=10, checkpoint_step=20)
        return world.status("a")

    wait_for(trains, lambda s: s.get("attempt") == 4 or s.get("phase") == "Restarting", "it grows")
    status = wait_size(world, 2, 4)
    assert "size" not in status["trainer"]
    world.wait_event("a", "TrainerResized")
