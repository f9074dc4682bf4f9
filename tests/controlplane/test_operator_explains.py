"""Why a run waits, told from the true words of scheduler, controllers and API server: the role, what is in the way, and the fix."""

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
"""Two nodes for a role's pods: other files of this control plane may have nodes, too."""


@pytest.fixture(scope="module")
def operator_settings() -> Mapping[str, str]:
    """A policy that leaves it to Kubernetes to refuse pods."""
    return UNRESTRICTED


def check_told(world: World, condition: str, reason: str, *words: str) -> None:
    """The condition of run `a` says so, and so does the run's own message."""

    def complete(status: dict[str, Any]) -> bool:
        return status.get("reason") == reason and all(word in status.get("message", "") for word in words)

    status = wait_for(lambda: world.status("a"), complete, f"{reason}: {', '.join(words)}")
    found = world.condition("a", condition)
    assert (found["status"], found["reason"], found["message"]) == ("False", reason, status["message"])
    assert status["phase"] == "Starting", "it goes on by itself once that is mended"


def memory(amount: str) -> dict[str, Any]:
    return {"resources": {"requests": {"memory": amount}}}


def test_a_quota_that_leaves_no_room_for_the_orchestrator(world: World) -> None:
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


def test_pod_security_refuses_what_a_template_asks_for(world: World, cluster: Cluster) -> None:
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
def test_pod_security_that_refuses_the_pods_of_a_controller(world: World, cluster: Cluster, role: str) -> None:
    """A StatefulSet or Deployment is accepted whatever its pods ask for: only its controller hears the refusal."""
    cluster.kubectl("label", "namespace", world.namespace, "pod-security.kubernetes.io/enforce=restricted")
    world.create("a", **{role: {"podTemplate": {"spec": {"hostNetwork": True}}}})
    words = (f"{role}: its pods are refused", 'violates PodSecurity "restricted:latest"', "hostNetwork=true")
    check_told(world, "Scheduled", "PodsRefused", *words, f"change what {role}.podTemplate adds")


def test_a_claim_for_one_pod_that_another_pod_uses(world: World) -> None:
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
def test_a_spread_that_is_not_possible(world: World, key: str) -> None:
    spread = {"maxSkew": 1, "minDomains": 3, "topologyKey": key, "whenUnsatisfiable": "DoNotSchedule"}
    spread["labelSelector"] = {"matchLabels": {"rlrun.io/role": "inference"}}  # type: ignore[assignment]
    world.create(
        "a", inference={"replicas": 3, **HERE, "podTemplate": {"spec": {"topologySpreadConstraints": [spread]}}}
    )
    words = ("inference needs 3 pods", "topologySpreadConstraints of inference.podTemplate", "ScheduleAnyway")
    check_told(world, "Scheduled", "Unschedulable", *words)


def test_more_engines_than_nodes_for_one_each(world: World) -> None:
    world.create("a", inference={"replicas": 3, **HERE}, placement={"spreadInference": "Required"})
    words = ("inference needs 3 pods", "each engine needs its own node", "lower inference.replicas")
    check_told(world, "Scheduled", "Unschedulable", *words)


def test_a_topology_that_no_nodes_have(world: World) -> None:
    world.create("a", trainer={"replicas": 2, **HERE}, placement={"topology": {"required": "nvidia.com/gpu.clique"}})
    words = ("trainer needs 2 pods", "no such node has the label nvidia.com/gpu.clique", "correct placement.topology")
    check_told(world, "Scheduled", "Unschedulable", *words)


def test_a_topology_in_which_there_is_not_enough_room(world: World) -> None:
    trainer = {"replicas": 2, "gpusPerReplica": 5, **HERE}
    world.create("a", trainer=trainer, placement={"topology": {"required": "kubernetes.io/hostname"}})
    words = ("trainer needs 2 pods with 5 nvidia.com/gpu each", "by the label kubernetes.io/hostname")
    check_told(world, "Scheduled", "Unschedulable", *words, "set placement.topology.preferred instead")


def test_a_taint_that_is_not_tolerated(world: World, cluster: Cluster) -> None:
    with fake_nodes(cluster, 1, prefix="tainted", labels={"dedicated": "team-b"}) as (name,):
        taint = {"key": "team", "value": "b", "effect": "NoSchedule"}
        world.kube("PATCH", f"/api/v1/nodes/{name}", {"spec": {"taints": [taint]}})
        world.create("a", trainer={"nodeSelector": {"dedicated": "team-b"}})
        words = ("1 node qualifies, except for the taint team=b", "add a toleration to trainer.tolerations")
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
"""Name of a child of run `a`, its API, and an object of somebody else."""


@pytest.mark.parametrize("plural", TAKEN)
def test_an_object_of_somebody_else_that_has_a_childs_name(world: World, plural: str) -> None:
    """It is neither used nor taken over: an owner's reference to the run would delete it with the run."""
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
