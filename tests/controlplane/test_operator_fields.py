"""Children from fields on a real API server: valid fields give accepted children, refusals name the field of the
manifest."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from tests.controlplane.harness import wait_for
from tests.controlplane.installation import UNRESTRICTED
from tests.controlplane.world import APPS, CORE, World

LONGEST = "a" * 39 + "z"
SUBDOMAIN = ".".join(["a" * 63] * 3 + ["b" * 61])
LABEL = "A" + "a_-." * 15 + "9z"
KEY = f"{'a' * 63}.example.com/{LABEL}"
VARIABLES: list[dict[str, Any]] = [
    {"name": "A" * 253, "value": "ä \n $(HOME) " + "x" * 1000},
    {"name": "_"},
    {"name": "with-dash.and.dot", "value": ""},
    {"name": "S", "valueFrom": {"secretKeyRef": {"name": SUBDOMAIN, "key": "." + "k" * 252, "optional": True}}},
    {"name": "L", "valueFrom": {"fieldRef": {"fieldPath": f"metadata.labels['{KEY}']", "apiVersion": "v1"}}},
    {"name": "N", "valueFrom": {"fieldRef": {"fieldPath": "status.hostIPs"}}},
]
EDGE: dict[str, Any] = {
    "image": "registry-1.example.com:5000/a/b__c/d-e.f:V_1.2-x@sha256:" + "0" * 64,
    "imagePullSecrets": [{"name": SUBDOMAIN}],
    "resources": {
        "requests": {"cpu": "100m", "memory": 1000000, "ephemeral-storage": "1.5Gi"},
        "limits": {"memory": "2e9", KEY: 1},
    },
    "nodeSelector": {KEY: "", "zone": LABEL},
    "tolerations": [
        {"operator": "Exists"},
        {"key": KEY, "value": LABEL, "effect": "NoExecute", "tolerationSeconds": 0},
        {"key": KEY, "operator": "Exists", "value": ""},
    ],
    "env": VARIABLES,
    "envFrom": [
        {"prefix": "P-", "secretRef": {"name": SUBDOMAIN, "optional": True}},
        {"configMapRef": {"name": "c", "optional": True}},
    ],
    "sharedMemory": "0.5Gi",
}


@pytest.fixture(scope="module")
def operator_settings() -> Mapping[str, str]:
    """Settings of an operator that leaves refusals of pods to Kubernetes."""
    return UNRESTRICTED


def wait_template(world: World, name: str, sets: str, role: str) -> dict[str, Any]:
    """Wait for the pod template of a role."""
    path = world.path(APPS, sets, f"{name}-{role}")
    found = wait_for(lambda: world.kube.get(path), lambda child: child is not None, f"{role} is made")
    assert found is not None
    template: dict[str, Any] = found["spec"]["template"]
    return template


def test_edge_values_produce_valid_children(world: World) -> None:
    environment = {
        "id": "my_package.sub:make_it",
        "name": "N" + "_.-:" * 15 + "zz",
        "groupSize": 8,
        "image": "localhost/team/env",
        "python": "/opt/my env/bin/python",
        "variables": ["AWS_*", "_X"],
        "volumePaths": ["données/a b", "x"],
    }
    world.create(
        LONGEST,
        model={"path": "/models/ünïcode folder"},
        environments=[environment],
        trainer={**EDGE, "replicas": 4, "guests": ["a*"], "lora": {"slots": 2, "targets": ["*.mlp.up_proj"]}},
        inference={
            **EDGE,
            "extraArgs": ["--block-size", "32", "-O3", '--compilation-config={"a": "b c"}', "--x", "-1", "a", "b"],
        },
        orchestrator={**EDGE, "batchSize": 16},
        storage={
            "claimTemplate": {"size": "1000000", "storageClassName": SUBDOMAIN},
            "mountPath": "/mnt/" + "/".join(["d" * 60] * 8),
            "subPath": "team_a/" + "s" * 300,
        },
        placement={"gpuProduct": LABEL, "pool": LABEL, "topology": {"required": KEY}},
        failurePolicy={"rules": [{"name": "ä" * 63, "action": "FailRun", "roles": ["trainer"]}]},
        checkpoint={"resume": {"fromRun": "team-b/Run 1"}},
    )
    trainer = wait_template(world, LONGEST, "statefulsets", "trainer")
    (container,) = trainer["spec"]["containers"]
    names = [variable["name"] for variable in container["env"]]
    assert [each["name"] for each in VARIABLES if each["name"] not in names] == []
    wait_template(world, LONGEST, "deployments", "inference")
    orchestrator = world.path(CORE, "pods", f"{LONGEST}-orchestrator-1")
    wait_for(lambda: world.kube.get(orchestrator), lambda pod: pod is not None, "the orchestrator is made")
    claim = world.kube("GET", world.path(CORE, "persistentvolumeclaims", f"{LONGEST}-data"))
    assert claim["spec"]["storageClassName"] == SUBDOMAIN
    wait_for(
        lambda: world.condition(LONGEST, "ConfigurationValid"),
        lambda condition: condition.get("status") == "True",
        "the status tells that the configuration is valid",
    )


def test_largest_lists_stay_below_policy_cost_limit(world: World) -> None:
    env = [{"name": f"V{i:0252}", "value": "x" * 1000} for i in range(128)]
    pods = {
        "env": env,
        "nodeSelector": {f"{'a' * 60}.{'b' * 60}/{'k' * 58}{i:04}": "v" * 63 for i in range(32)},
        "tolerations": [{"key": f"{'a' * 60}/{'k' * 58}{i:04}", "operator": "Exists"} for i in range(32)],
        "envFrom": [{"secretRef": {"name": SUBDOMAIN}} for _ in range(32)],
        "resources": {kind: {f"example.com/{i}": 1 for i in range(32)} for kind in ("limits", "requests")},
    }
    arguments = [f"--{'flag-' * 50}{i}={'v' * 700}" for i in range(64)]
    rules = [{"name": f"{i:063}", "action": "Restart", "roles": ["trainer"]} for i in range(32)]
    paths = [f"{'d' * 120}/{'e' * 120}/{i}" for i in range(16)]
    one = {"id": "i" * 253, "groupSize": 8, "image": f"example.com/{'p' * 480}", "volumePaths": paths}
    world.create(
        "large",
        suspend=True,
        environments=[{**one, "name": f"{i:063}"} for i in range(64)],
        trainer=pods,
        inference={**pods, "extraArgs": arguments},
        orchestrator={**pods, "batchSize": 16},
        failurePolicy={"rules": rules},
    )
    assert world.run("large")["spec"]["suspend"]


@pytest.mark.full
@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (
            {"trainer": {"resources": {"limits": {"example.com/rdma": "500m"}}}},
            'trainer.resources.limits[example.com/rdma]: Invalid value: "500m": must be an integer',
        ),
        (
            {"inference": {"affinity": {"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [{"topologyKey": "a b"}]}}}},
            "inference.affinity.podAffinity.requiredDuringSchedulingIgnoredDuringExecution[0].topologyKey: Invalid value",
        ),
        (
            {"orchestrator": {"podTemplate": {"spec": {"containers": [{"name": "mine", "image": "x", "env": [{"name": "A="}]}]}}}},
            'orchestrator.podTemplate.spec.containers[0].env[0].name: Invalid value: "A="',
        ),
        (
            {"trainer": {"podTemplate": {"spec": {"containers": [{"name": "trainer", "imag": "x"}]}}}},
            "trainer.podTemplate.spec.containers[0].imag: field not declared in schema",
        ),
        (
            {"networkPolicy": {"extraEgress": [{"to": [{"ipBlock": {"cidr": "10.0.0.0"}}]}]}},
            "networkPolicy.extraEgress[0].to[0].ipBlock.cidr: Invalid value",
        ),
    ],
    ids=["resources", "affinity", "template", "unknown field", "network policy"],
)  # fmt: skip
def test_refused_child_is_reported_as_manifest_field(world: World, spec: dict[str, Any], words: str) -> None:
    base: dict[str, Any] = {"orchestrator": {"batchSize": 16}}
    world.create("a", **{name: {**base.get(name, {}), **value} for name, value in (base | spec).items()})
    assert words in world.wait_phase("a", "Failed")["message"]
    assert words in world.condition("a", "ConfigurationValid")["message"]
    assert world.pods("a") == []


def refusal(world: World, name: str, spec: dict[str, Any]) -> str:
    return str(
        world.kube("PATCH", world.path("/apis/rlrun.io/v1alpha1", "rlruns", name), {"spec": spec}, ok=False)["message"]
    )


def annotate(world: World, name: str, value: str) -> None:
    world.cluster.kubectl("annotate", "rlr", name, "-n", world.namespace, f"rlrun.io/restart-requested-at={value}")


@pytest.mark.full
def test_edit_advice_for_failed_run_works(world: World) -> None:
    world.start("a")
    world.edit("a", {"activeDeadlineSeconds": 1})
    world.wait_phase("a", "Failed")
    said = refusal(world, "a", {"seed": 7})
    assert "the run has failed: set spec.suspend to true, annotate it with rlrun.io/restart-requested-at" in said
    world.edit("a", {"suspend": True, "activeDeadlineSeconds": None})
    annotate(world, "a", "2026-01-01T00:00:00Z")
    world.wait_phase("a", "Suspended")
    world.edit("a", {"suspend": False, "seed": 7})
    world.wait_pods_ready("a", 2)


@pytest.mark.full
def test_edit_advice_for_complete_run_works(world: World) -> None:
    world.start("a")
    world.end_pod("a-orchestrator-1", 0)
    world.wait_phase("a", "Complete")
    said = refusal(world, "a", {"seed": 7})
    assert "the run is complete: set spec.suspend to true, raise spec.maxSteps, wait for phase Suspended" in said
    world.edit("a", {"suspend": True, "maxSteps": 200})
    world.wait_phase("a", "Suspended")
    world.edit("a", {"suspend": False, "seed": 7})
    world.wait_pods_ready("a", 2)
