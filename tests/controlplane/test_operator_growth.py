"""Growth of a run's claim on a real API server, with storage classes that allow it and that refuse it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.cluster import Cluster
from tests.controlplane.harness import Kube, OperatorProcess, wait_for
from tests.controlplane.world import CORE, RUNS, World

pytestmark = pytest.mark.full

GROWS = {
    "apiVersion": "storage.k8s.io/v1",
    "kind": "StorageClass",
    "metadata": {"name": "grows"},
    "provisioner": "kubernetes.io/host-path",
    "allowVolumeExpansion": True,
}
CLASSES = "/apis/storage.k8s.io/v1/storageclasses"
ASKED = "rlrun_operator_api_requests_total"


@pytest.fixture(scope="module", autouse=True)
def growing(cluster: Cluster) -> Iterator[None]:
    """A storage class whose volumes may grow."""
    kube = Kube(cluster.kubeconfig)
    kube("POST", CLASSES, GROWS)
    yield
    kube("DELETE", f"{CLASSES}/grows")


def sized(size: str, of_class: str) -> dict[str, Any]:
    return {"claimTemplate": {"size": size, "storageClassName": of_class}}


def read_claim(world: World) -> dict[str, Any]:
    return world.kube("GET", world.path(CORE, "persistentvolumeclaims", "a-data"))


def wait_bound(world: World) -> None:
    wait_for(
        lambda: world.condition("a", "StorageReady"),
        lambda found: found.get("message") == "claim a-data is bound",
        "nothing but the binding is told",
    )


def count_claim_patches(operator: OperatorProcess) -> float:
    """Return the number of patches of claims."""
    found = operator.metrics().items()
    return sum(
        value for name, value in found if ASKED in name and '"persistentvolumeclaims"' in name and '"patch"' in name
    )


def test_claim_grows_while_run_trains(world: World) -> None:
    world.start("a", storage=sized("1Gi", "grows"))
    wait_bound(world)
    others = ("persistentvolumeclaims", "leases", "poddisruptionbudgets")
    before, uid = world.settled("a", leave_out=others), read_claim(world)["metadata"]["uid"]
    world.edit("a", {"storage": sized("3Gi", "grows")})
    wait_for(
        lambda: read_claim(world)["spec"]["resources"]["requests"]["storage"],
        lambda size: size == "3Gi",
        "the claim asks",
    )
    wait_for(lambda: world.status("a")["storage"], lambda found: found.get("size") == "3Gi", "the status has the size")
    capacity = {"status": {"capacity": {"storage": "3Gi"}}}
    world.kube("PATCH", world.path(CORE, "persistentvolumeclaims", "a-data") + "/status", capacity)
    wait_bound(world)
    assert read_claim(world)["metadata"]["uid"] == uid
    assert world.versions("a", leave_out=others) == before, "nothing else is touched"
    status = world.status("a")
    assert (status["phase"], status["attempt"], status["restarts"]) == ("Running", 1, 0)
    assert world.condition("a", "ConfigurationValid")["reason"] == "Valid"
    refused = world.kube(
        "PATCH", world.path(RUNS, "rlruns", "a"), {"spec": {"storage": sized("2Gi", "grows")}}, ok=False
    )
    assert (
        "spec.storage.claimTemplate.size: size (2Gi) must be at least 3Gi since attempt 1 began" in refused["message"]
    )


def test_unresizable_storage_class_is_reported_once(world: World, operator: OperatorProcess) -> None:
    world.start("a", storage=sized("1Gi", "shared"))
    wait_bound(world)
    before = count_claim_patches(operator)
    world.edit("a", {"storage": sized("2Gi", "shared")})
    found = wait_for(
        lambda: world.condition("a", "StorageReady"),
        lambda condition: condition.get("reason") == "ClaimResizeRefused",
        "the refusal is told",
    )
    assert found["status"] == "True"
    for words in (
        "it stays at 1Gi, and the run continues",
        "requests 2Gi, which is refused",
        "the storageclass that provisions the pvc must support resize",
        "have allowVolumeExpansion set in StorageClass shared",
    ):
        assert words in found["message"], found
    world.renew("a", 2)
    wait_for(lambda: world.status("a")["progress"]["step"], lambda step: step == 2, "the run goes on")
    assert count_claim_patches(operator) == before + 1, "it is not asked in each pass"
    assert world.wait_event("a", "ClaimResizeRefused").count("ClaimResizeRefused") == 1, "one event tells it"
    assert read_claim(world)["spec"]["resources"]["requests"]["storage"] == "1Gi"
    world.edit("a", {"storage": sized("1Gi", "shared")})
    wait_bound(world)
