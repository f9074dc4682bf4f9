"""Repairs of deleted or edited Services, policies, rights and workloads during an attempt."""

from __future__ import annotations

from typing import Any

import pytest

from tests.controlplane.harness import wait_for
from tests.controlplane.world import APPS, CORE, RUNS, World

RBAC = "/apis/rbac.authorization.k8s.io/v1"
NETWORK = "/apis/networking.k8s.io/v1"
PARTS: tuple[tuple[str, str, str, dict[str, Any]], ...] = (
    (CORE, "services", "Service drift-trainer", {"spec": {"publishNotReadyAddresses": False}}),
    (CORE, "services", "Service drift-inference", {"spec": {"selector": {"rlrun.io/role": "trainer"}}}),
    (CORE, "configmaps", "ConfigMap drift-rlrun", {"data": {"run.json": "{}"}}),
    (CORE, "serviceaccounts", "ServiceAccount drift-rlrun", {"automountServiceAccountToken": True}),
    (RBAC, "roles", "Role drift-rlrun", {"rules": []}),
    (RBAC, "rolebindings", "RoleBinding drift-rlrun", {"subjects": None}),
    (NETWORK, "networkpolicies", "NetworkPolicy drift-rlrun", {"spec": {"ingress": None}}),
    (NETWORK, "networkpolicies", "NetworkPolicy drift-egress", {"spec": {"egress": [{}]}}),
    ("/apis/policy/v1", "poddisruptionbudgets", "PodDisruptionBudget drift-inference", {"spec": {"maxUnavailable": 2}}),
)
"""API, plural, kind and name of a child, and an edit of it."""


@pytest.mark.parametrize("verb", [pytest.param("deleted", marks=pytest.mark.full), "edited"])
def test_changed_children_are_repaired_and_reported_without_restart(world: World, verb: str) -> None:
    world.create("drift", inference={"replicas": 2})
    world.wait_phase("drift", "Starting")
    world.wait_pods_ready("drift", 3)
    world.renew("drift", step=3)
    world.wait_phase("drift", "Running")
    assert world.condition("drift", "ChildrenIntact") == {}, "nobody has touched anything"
    for api, plural, part, change in PARTS:
        path = world.path(api, plural, part.partition(" ")[2])
        before = _strip_server_fields(world.kube("GET", path))
        if verb == "deleted":
            world.kube("DELETE", path)
        else:
            world.kube("PATCH", path, change)
        wait_for(
            lambda: world.condition("drift", "ChildrenIntact"),
            lambda c, part=part: _is_repaired(c, part, verb),
            f"{part} is told",
        )
        assert _strip_server_fields(world.kube("GET", path)) == before
    status = world.status("drift")
    assert (status["attempt"], status["phase"], status.get("restarts", 0)) == (1, "Running", 0)
    world.wait_event("drift", "Drifted")


WORKLOADS = (
    (
        "deployments",
        "drift-inference",
        {"image": "registry/evil:1"},
        "spec.template.spec.containers[0].image is now registry/evil:1, set by unknown",
    ),
    ("statefulsets", "drift-trainer", {"env": None}, "spec.template.spec.containers[0].env was removed"),
)
"""Plural, name, edit of the first container, and the expected report."""


def test_edited_workloads_are_restored_and_reported(world: World) -> None:
    world.create("drift", inference={"replicas": 2})
    world.wait_phase("drift", "Starting")
    world.wait_pods_ready("drift", 3)
    world.renew("drift", step=3)
    world.wait_phase("drift", "Running")
    for plural, name, change, told in WORKLOADS:
        path = world.path(APPS, plural, name)
        before = world.kube("GET", path)["spec"]
        _edit_container(world, path, change)
        wait_for(
            lambda: world.condition("drift", "ChildrenIntact"),
            lambda c, told=told: c.get("reason") == "Repaired" and told in c["message"],  # type: ignore[misc]
            f"the edit of {name} is reported",
        )
        assert world.kube("GET", path)["spec"] == before
    pod = world.path(CORE, "pods", "drift-orchestrator-1")
    _edit_container(world, pod, {"image": "registry/evil:2"})
    found = wait_for(
        lambda: world.condition("drift", "ChildrenIntact"),
        lambda c: "spec.containers[0].image is now registry/evil:2" in c.get("message", ""),
        "the edit of the orchestrator is reported",
    )
    assert (found["status"], found["reason"]) == ("False", "Drifted")
    status = world.status("drift")
    assert (status["attempt"], status.get("restarts", 0)) == (1, 0)


@pytest.mark.full
def test_autoscaler_of_deployment_is_reported_with_fix(world: World) -> None:
    """An autoscaler without metrics still enforces `minReplicas`."""
    world.create("drift", inference={"replicas": 2})
    world.wait_phase("drift", "Starting")
    world.wait_pods_ready("drift", 3)
    world.renew("drift", step=3)
    world.wait_phase("drift", "Running")
    target = {"apiVersion": "apps/v1", "kind": "Deployment", "name": "drift-inference"}
    scaler = {"metadata": {"name": "busy"}, "spec": {"scaleTargetRef": target, "minReplicas": 4, "maxReplicas": 6}}
    world.kube("POST", world.path("/apis/autoscaling/v2", "horizontalpodautoscalers"), scaler)
    wait_for(
        lambda: world.condition("drift", "ChildrenIntact").get("message", ""),
        lambda told: (
            "was scaled to 4 by kube-controller-manager" in told and "name RLRun drift in scaleTargetRef" in told
        ),
        "the autoscaler is reported",
    )
    path = world.path(APPS, "deployments", "drift-inference")
    wait_for(lambda: world.kube("GET", path)["spec"]["replicas"], lambda count: count == 2, "two engines are left")
    world.wait_event("drift", "Drifted")


def test_foreground_deletion_waits_for_children(world: World) -> None:
    """`kubectl delete rlr NAME --cascade=foreground --wait`. The test holds a Service because kwok removes finalizers
    of pods."""
    world.start("front")
    run, held = world.path(RUNS, "rlruns", "front"), world.path(CORE, "services", "front-trainer")
    world.kube("PATCH", held, {"metadata": {"finalizers": ["test.example/hold"]}})
    world.kube("DELETE", run, {"kind": "DeleteOptions", "apiVersion": "v1", "propagationPolicy": "Foreground"})
    rest = {"services/front-trainer", "persistentvolumeclaims/front-data"}
    wait_for(lambda: set(world.versions("front")), lambda found: found == rest, "everything else is deleted")
    found = world.kube("GET", run)["metadata"]
    assert found["finalizers"] == ["foregroundDeletion"]
    world.kube("PATCH", held, {"metadata": {"finalizers": None}})
    wait_for(lambda: world.kube.get(run), lambda found: found is None, "the run is gone")
    assert set(world.versions("front")) == {"persistentvolumeclaims/front-data"}, "it has a volume"


def _edit_container(world: World, path: str, change: dict[str, Any]) -> None:
    """Merge into the first container of a workload or a pod, because a JSON merge patch replaces whole lists."""
    found = world.kube("GET", path)
    spec = found["spec"] if found["kind"] == "Pod" else found["spec"]["template"]["spec"]
    first = {name: value for name, value in (spec["containers"][0] | change).items() if value is not None}
    part = {"containers": [first, *spec["containers"][1:]]}
    world.kube("PATCH", path, {"spec": part if found["kind"] == "Pod" else {"template": {"spec": part}}})


def _is_repaired(condition: dict[str, Any], part: str, verb: str) -> bool:
    told = (condition.get("status"), condition.get("reason"), condition.get("message", ""))
    return told[:2] == ("True", "Repaired") and f"{part} was {verb}" in told[2]


def _strip_server_fields(part: dict[str, Any]) -> dict[str, Any]:
    """Return the content of a child without the fields that the API server writes."""
    apart = ("metadata", "status", "secrets")
    return {name: value for name, value in part.items() if name not in apart} | {"labels": part["metadata"]["labels"]}
