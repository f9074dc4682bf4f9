"""Spot engines on a real control plane: their node is drained and returns, and the run continues in the same attempt."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.cluster import Cluster
from tests.controlplane.harness import Kube, wait_for
from tests.controlplane.installation import fake_nodes
from tests.controlplane.world import APPS, World

pytestmark = pytest.mark.full

HERE = {"spot-test": "yes"}
SPOT = {"capacity": "spot"}


@pytest.fixture(scope="module")
def nodes(cluster: Cluster) -> Iterator[tuple[str, ...]]:
    """One regular node and one spot node with the taint that clouds set."""
    taint = {"key": "capacity", "value": "spot", "effect": "NoSchedule"}
    with (
        fake_nodes(cluster, 1, prefix="plain", labels=HERE) as plain,
        fake_nodes(cluster, 1, prefix="spot", labels=HERE | SPOT) as spot,
    ):
        Kube(cluster.kubeconfig)("PATCH", f"/api/v1/nodes/{spot[0]}", {"spec": {"taints": [taint]}})
        yield plain + spot


def wait_spot(world: World, **wanted: int) -> dict[str, Any]:
    """Wait until the status has these counts of spot engines; return it."""
    return wait_for(
        lambda: world.status("a"),
        lambda s: wanted.items() <= ((s.get("inference") or {}).get("spot") or {}).items(),
        f"spot engines: {wanted}",
    )


def engines(world: World) -> dict[str, int]:
    """Return replicas by Deployment."""
    found = world.kube.items(world.path(APPS, "deployments"))
    return {child["metadata"]["name"]: child["spec"]["replicas"] for child in found}


def test_run_continues_through_loss_of_spot_engines(world: World, cluster: Cluster) -> None:
    world.create("a", inference={"replicas": 3, "nodeSelector": HERE, "spot": {"share": 0.7, "nodeSelector": SPOT}})
    wait_spot(world, desired=2, ready=2)
    world.wait_pods_ready("a", 4)
    world.renew("a", 1)
    world.wait_phase("a", "Running")
    where = {pod["metadata"]["name"]: pod["spec"]["nodeName"] for pod in world.pods("a")}
    assert sorted(node for name, node in where.items() if "-inference-" in name) == ["plain-0", "spot-0", "spot-0"]
    assert {node for name, node in where.items() if "-inference-spot-" in name} == {"spot-0"}

    cluster.kubectl("drain", "spot-0", "--ignore-daemonsets", "--delete-emptydir-data", "--force", "--timeout=60s")
    status = wait_spot(world, desired=2, ready=0, lost=2)
    assert (status["phase"], status["attempt"], status["restarts"]) == ("Running", 1, 0)
    assert "EvictionByEvictionAPI" in status["inference"]["spot"]["lastLoss"]
    wait_for(
        lambda: world.condition("a", "InferenceAvailable"),
        lambda c: "2 of 2 spot engines find no node with capacity=spot: the run continues more slowly" in c["message"],
        "the run says what it lacks",
    )
    status = world.status("a")
    said = {c["type"]: c["status"] for c in status["conditions"]}
    assert (said["InferenceAvailable"], said["Scheduled"], said["Stalled"]) == ("True", "True", "False")
    assert engines(world) == {"a-inference": 1, "a-inference-spot": 2}
    wait_for(lambda: world.events("a"), lambda told: "SpotEnginesLost" in told, "the loss is an event")

    cluster.kubectl("uncordon", "spot-0")
    status = wait_spot(world, desired=2, ready=2, lost=2)
    assert (status["phase"], status["attempt"], status["restarts"]) == ("Running", 1, 0)
    wait_for(lambda: world.events("a"), lambda told: "SpotEnginesReady" in told, "their return is an event")

    world.edit("a", {"inference": {"spot": {"share": 0.4}}})
    wait_for(lambda: engines(world), lambda n: n == {"a-inference": 2, "a-inference-spot": 1}, "another share")
    assert (world.status("a")["attempt"], world.condition("a", "ConfigurationValid")["reason"]) == (1, "Valid")
    world.edit("a", {"inference": {"spot": None}})
    wait_for(lambda: engines(world), lambda n: n == {"a-inference": 3}, "no spot engines")
    status = wait_for(lambda: world.status("a"), lambda s: "spot" not in s["inference"], "the status follows")
    assert status["attempt"] == 1
