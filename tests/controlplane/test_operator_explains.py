"""Explanations of waiting runs from real messages of the scheduler, controllers and API server: role, cause and fix."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from tests.cluster import Cluster
from tests.controlplane.harness import wait_for
from tests.controlplane.installation import SHARED_NODE, UNRESTRICTED, fake_nodes
from tests.controlplane.world import CORE, World

pytestmark = pytest.mark.full

HERE = {"nodeSelector": SHARED_NODE}
"""Labels of two nodes for the pods of a role, because other files may have nodes, too."""


@pytest.fixture(scope="module")
def operator_settings() -> Mapping[str, str]:
    """Settings of an operator that leaves refusals of pods to Kubernetes."""
    return UNRESTRICTED


def check_told(world: World, condition: str, reason: str, *words: str) -> None:
    """Check reason and message of a condition of run `a`, and that the run's own message equals it."""

    def complete(status: dict[str, Any]) -> bool:
        return status.get("reason") == reason and all(word in status.get("message", "") for word in words)

    status = wait_for(lambda: world.status("a"), complete, f"{reason}: {', '.join(words)}")
    found = world.condition("a", condition)
    assert (found["status"], found["reason"], found["message"]) == ("False", reason, status["message"])
    assert status["phase"] == "Starting", "it goes on by itself once that is mended"


def memory(amount: str) -> dict[str, Any]:
    return {"resources": {"requests": {"memory": amount}}}


def test_orchestrator_beyond_quota_is_reported(world: World) -> None:
    quota = {"metadata": {"name": "small"}, "spec": {"hard": {"requests.memory": "2Gi"}}}
    world.kube("POST", world.path(CORE, "resourcequotas"), quota)
    wait_for(
        lambda: world.kube("GET", world.path(CORE, "resourcequotas", "small")),
        lambda found: bool(found["status"].get("hard")),
        "the quota counts",
    )
    world.create(
        "a",
        trainer=memory("128Mi"),
        inference=memory("128Mi"),
        orchestrator={"batchSize": 16, **memory("4Gi")},
    )
    words = ("orchestrator: the quota does not allow its pods", "requested: requests.memory=4Gi", "have it raised")
    check_told(world, "Scheduled", "QuotaExceeded", *words)
    world.kube("PATCH", world.path(CORE, "resourcequotas", "small"), {"spec": {"hard": {"requests.memory": "8Gi"}}})
    wait_for(lambda: world.status("a"), lambda s: (s.get("orchestrator") or {}).get("ready") == 1, "it runs")


def test_pod_security_refusal_of_template_is_reported(world: World, cluster: Cluster) -> None:
    label = "pod-security.kubernetes.io/enforce=restricted"
    cluster.kubectl("label", "namespace", world.namespace, label)
    world.create("good")
    world.wait_pods_ready("good", 2)
    world.create("bad", orchestrator={"batchSize": 16, "podTemplate": {"spec": {"hostNetwork": True}}})
    words = ("orchestrator: its pods are refused", 'violates PodSecurity "restricted:latest"', "hostNetwork=true")
    wait_for(
        lambda: world.status("bad"),
        lambda s: all(word in s.get("message", "") for word in words),
        f"it says {words}",
    )
    assert world.status("bad")["phase"] in ("Pending", "Starting"), "who refuses may allow it later"
    assert world.pods("bad") == [], "nothing is made of what may never be whole"
    cluster.kubectl(
        "label", "namespace", world.namespace, "pod-security.kubernetes.io/enforce=privileged", "--overwrite"
    )
    world.wait_pods_ready("bad", 2)


@pytest.mark.parametrize("role", ["trainer", "inference"])
def test_pod_security_refusal_of_controller_pods_is_reported(world: World, cluster: Cluster, role: str) -> None:
    """The API server accepts any StatefulSet or Deployment; only its controller receives the refusal of the pods."""
    cluster.kubectl("label", "namespace", world.namespace, "pod-security.kubernetes.io/enforce=restricted")
    world.create("a", **{role: {"podTemplate": {"spec": {"hostNetwork": True}}}})
    words = (f"{role}: its pods are refused", 'violates PodSecurity "restricted:latest"', "hostNetwork=true")
    check_told(world, "Scheduled", "PodsRefused", *words, f"change what {role}.podTemplate adds")


def test_claim_for_one_pod_used_elsewhere_is_reported(world: World) -> None:
    claim = {
        "metadata": {"name": "single"},
        "spec": {
            "accessModes": ["ReadWriteOncePod"],
            "storageClassName": "shared",
            "resources": {"requests": {"storage": "1Gi"}},
        },
    }
    world.kube("POST", world.path(CORE, "persistentvolumeclaims"), claim)
    volume = {"name": "data", "persistentVolumeClaim": {"claimName": "single"}}
    user = {
        "metadata": {"name": "user"},
        "spec": {
            "nodeSelector": SHARED_NODE,
            "containers": [{"name": "main", "image": "none"}],
            "volumes": [volume],
        },
    }
    world.kube("POST", world.path(CORE, "pods"), user)
    wait_for(
        lambda: world.kube("GET", world.path(CORE, "pods", "user")),
        lambda pod: pod["status"]["phase"] == "Running",
        "another pod uses the claim",
    )
    world.create("a", storage={"claimName": "single"}, trainer=HERE)
    words = ("trainer needs 1 pod", "claim single has access mode ReadWriteOncePod", "storage.claimName")
    check_told(world, "Scheduled", "Unschedulable", *words)


@pytest.mark.parametrize("key", ["kubernetes.io/hostname", "zone"], ids=["too few nodes", "a label that no node has"])
def test_impossible_topology_spread_is_reported(world: World, key: str) -> None:
    spread = {"maxSkew": 1, "minDomains": 3, "topologyKey": key, "whenUnsatisfiable": "DoNotSchedule"}
    spread["labelSelector"] = {"matchLabels": {"rlrun.io/role": "inference"}}  # type: ignore[assignment]
    world.create(
        "a", inference={"replicas": 3, **HERE, "podTemplate": {"spec": {"topologySpreadConstraints": [spread]}}}
    )
    words = ("inference needs 3 pods", "topologySpreadConstraints of inference.podTemplate", "ScheduleAnyway")
    check_told(world, "Scheduled", "Unschedulable", *words)


def test_required_engine_spread_without_nodes_is_reported(world: World) -> None:
    world.create("a", inference={"replicas": 3, **HERE}, placement={"spreadInference": "Required"})
    words = ("inference needs 3 pods", "each engine needs its own node", "lower inference.replicas")
    check_told(world, "Scheduled", "Unschedulable", *words)


def test_unknown_topology_label_is_reported(world: World) -> None:
    world.create("a", trainer={"replicas": 2, **HERE}, placement={"topology": {"required": "nvidia.com/gpu.clique"}})
    words = ("trainer needs 2 pods", "no such node has the label nvidia.com/gpu.clique", "correct placement.topology")
    check_told(world, "Scheduled", "Unschedulable", *words)


def test_topology_without_room_is_reported(world: World) -> None:
    trainer = {"replicas": 2, "gpusPerReplica": 5, **HERE}
    world.create("a", trainer=trainer, placement={"topology": {"required": "kubernetes.io/hostname"}})
    words = ("trainer needs 2 pods with 5 nvidia.com/gpu each", "by the label kubernetes.io/hostname")
    check_told(world, "Scheduled", "Unschedulable", *words, "set placement.topology.preferred instead")


def test_untolerated_taint_is_reported(world: World, cluster: Cluster) -> None:
    with fake_nodes(cluster, 1, prefix="tainted", labels={"dedicated": "team-b"}) as (name,):
        taint = {"key": "team", "value": "b", "effect": "NoSchedule"}
        world.kube("PATCH", f"/api/v1/nodes/{name}", {"spec": {"taints": [taint]}})
        world.create("a", trainer={"nodeSelector": {"dedicated": "team-b"}})
        words = (
            "1 node qualifies, except for the taint team=b",
            "write trainer.tolerations: [{key: team, operator: Exists}]",
        )
        check_told(world, "Scheduled", "Unschedulable", *words)


TAKEN = {
    "persistentvolumeclaims": (
        "a-data",
        CORE,
        {"spec": {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}}},
    ),
    "serviceaccounts": ("a-rlrun", CORE, {}),
    "rolebindings": (
        "a-rlrun",
        "/apis/rbac.authorization.k8s.io/v1",
        {"roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "view"}},
    ),
    "services": ("a-trainer", CORE, {"spec": {"ports": [{"port": 80}]}}),
    "statefulsets": (
        "a-trainer",
        "/apis/apps/v1",
        {
            "spec": {
                "replicas": 0,
                "selector": {"matchLabels": {"app": "db"}},
                "template": {
                    "metadata": {"labels": {"app": "db"}},
                    "spec": {"containers": [{"name": "db", "image": "db"}]},
                },
            }
        },
    ),
}
"""Foreign objects by plural: name of a child of run `a`, its API, and the object."""


@pytest.mark.parametrize("plural", TAKEN)
def test_foreign_object_with_child_name_is_kept(world: World, plural: str) -> None:
    """The object is neither used nor adopted: an owner reference to the run would delete it with the run."""
    name, api, rest = TAKEN[plural]
    before = world.kube("POST", world.path(api, plural), {"metadata": {"name": name, "labels": {"app": "ours"}}} | rest)
    world.create("a")
    check = lambda s: s.get("reason") == "NameTaken" and f" {name} exists and is not of this run" in s["message"]  # noqa: E731
    status = wait_for(lambda: world.status("a"), check, "the name is told")
    assert (status["phase"], world.condition("a", "Scheduled")["reason"]) == ("Pending", "NameTaken")
    assert world.pods("a") == []
    now = world.kube("GET", world.path(api, plural, name))
    assert now["metadata"]["labels"] == {"app": "ours"}
    assert "ownerReferences" not in now["metadata"]
    assert now["metadata"]["uid"] == before["metadata"]["uid"]
    assert not [entry for entry in now["metadata"]["managedFields"] if "rlrun" in entry["manager"]]
    world.delete(plural, name, api)
    world.wait_pods_ready("a", 2)
