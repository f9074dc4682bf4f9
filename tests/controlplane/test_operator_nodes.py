"""Node exclusion and disruption budgets on a real control plane: effects of affinities on the scheduler."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cluster import Cluster
from tests.controlplane.harness import wait_for
from tests.controlplane.installation import fake_nodes
from tests.controlplane.world import CORE, World

SIGSEGV = 139
HERE = {"nodeSelector": {"nodes-test": "yes"}}


@pytest.fixture(scope="module")
def nodes(cluster: Cluster) -> Iterator[tuple[str, ...]]:
    """Two nodes, so that three failures hit one of them twice."""
    with fake_nodes(cluster, 2, prefix="nodes", labels=HERE["nodeSelector"]) as names:
        yield names


def test_node_with_two_failures_is_excluded(world: World, nodes: tuple[str, ...]) -> None:
    policy = {"maxRestarts": 5, "backoff": {"initialSeconds": 0.1, "maxSeconds": 0.1}}
    roles = {"trainer": HERE, "inference": {"replicas": 2, **HERE}, "orchestrator": {"batchSize": 16, **HERE}}
    world.create("a", **roles, failurePolicy=policy)
    attempt, excluded = 1, ""
    while not excluded:
        world.wait_phase("a", "Starting", attempt=attempt)
        world.wait_pods_ready("a", 3)
        world.end_container("a-trainer-0", SIGSEGV)
        attempt += 1
        status = wait_for(
            lambda wanted=attempt: world.status("a"),  # type: ignore[misc]
            lambda s, wanted=attempt: s["attempt"] == wanted,  # type: ignore[misc]
            f"attempt {attempt}",
        )
        excluded = next((node["name"] for node in status.get("excludedNodes", ())), "")
        assert attempt <= 4, status["failures"]
    (other,) = {*nodes} - {excluded}
    world.wait_pods_ready("a", 3)
    placed = {
        pod["metadata"]["name"]: pod["spec"]["nodeName"]
        for pod in world.kube.items(world.path(CORE, "pods"))
        if "-inference-" not in pod["metadata"]["name"]
    }
    assert placed == {"a-trainer-0": other, f"a-orchestrator-{attempt}": other}
    budget = world.kube("GET", world.path("/apis/policy/v1", "poddisruptionbudgets", "a-inference"))
    assert budget["spec"]["maxUnavailable"] == 1
    wait_for(
        lambda: world.kube("GET", world.path("/apis/policy/v1", "poddisruptionbudgets", "a-inference"))["status"],
        lambda seen: (seen.get("expectedPods"), seen.get("disruptionsAllowed")) == (2, 1),
        "one of two engines may be evicted",
    )
