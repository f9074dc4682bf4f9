"""The chart's ValidatingAdmissionPolicy: the API server refuses the same runs as the operator, case by case."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from rlrun_operator.restrictions import RunPolicy
from tests.cluster import Cluster
from tests.controlplane.harness import Json, wait_for
from tests.controlplane.installation import ROOT, SHARED_NODE, fresh_namespace
from tests.controlplane.world import APPS, RUNS, World, run
from tests.unit.operator.restrictions.cases import ANY, CASES, CONTAINER, DEFAULTS, EVERYTHING, LISTS, SAYS, Case, pod

CHART = str(ROOT / "charts" / "rlrun-operator")
SYSTEM = "restrictions-system"
HERE = {"nodeSelector": SHARED_NODE}
ACCOUNT = "boss"
POLICIES = {"defaults": DEFAULTS, "lists": LISTS, "any": ANY, "container": CONTAINER, "everything": EVERYTHING}

OF_ANOTHER_TYPE = ("no-map", "no-list")
"""Cases whose values no CEL expression can judge: the expression ends in an error."""


def install(cluster: Cluster, name: str, policy: RunPolicy, namespace: str, *, own: bool = False) -> None:
    """Install the operator's chart with an admission policy for one namespace, without an operator."""
    values = {
        "policy": policy.model_dump(mode="json", by_alias=True),
        "admissionPolicy": {"enabled": True},
        "watchNamespaces": [namespace],
        "serviceAccount": {"name": ACCOUNT},
        "serveOwnNamespace": own,
        "replicas": 0,
    }
    system = namespace if own else f"{SYSTEM}-{name}"
    cluster.helm(
        "upgrade", "--install", name, CHART, "--namespace", system, "--create-namespace", "--values", "-",
        stdin=json.dumps(values),
    )  # fmt: skip


def try_create(world: World, spec: dict[str, Any], name: str = "run") -> Json:
    """Return the API server's answer to a dry-run creation of a run."""
    return world.kube("POST", f"{world.path(RUNS, 'rlruns')}?dryRun=All", run(name, **spec), ok=False)


def wait_enforced(world: World, spec: dict[str, Any]) -> None:
    """Wait until the API server applies a new policy."""
    wait_for(lambda: try_create(world, spec), lambda a: a.get("kind") == "Status", "the policy refuses")


@pytest.fixture(scope="module")
def worlds(cluster: Cluster) -> Iterator[dict[str, World]]:
    """One namespace for each policy."""
    with ExitStack() as stack:
        found = {name: World(cluster, stack.enter_context(fresh_namespace(cluster))) for name in POLICIES}
        for name, policy in POLICIES.items():
            install(cluster, name, policy, found[name].namespace)
        key = {"trainer": {"envFrom": [{"secretRef": {"name": "x-key-0123abcd"}}]}}
        for world in found.values():
            wait_enforced(world, key)
        yield found
        for name in POLICIES:
            cluster.helm("uninstall", name, "--namespace", f"{SYSTEM}-{name}")


def test_operator_starts_only_runs_allowed_by_policy(world: World, cluster: Cluster) -> None:
    """The namespace has the labels of docs/install.md and no admission policy."""
    cluster.kubectl("label", "namespace", world.namespace, "pod-security.kubernetes.io/enforce=restricted")
    asked = {
        "hostNetwork": True,
        "serviceAccountName": "default",
        "volumes": [{"name": "x", "hostPath": {"path": "/"}}],
    }
    roles = {"inference": HERE, "orchestrator": {"batchSize": 16, **HERE}}
    world.create("a", **roles, trainer={**HERE, "podTemplate": {"spec": asked}})
    status = world.wait_phase("a", "Failed")
    for field in ("hostNetwork (true)", "serviceAccountName (default)", "volumes[0].hostPath"):
        assert f"trainer.podTemplate.spec.{field}" in status["message"]
    valid = world.condition("a", "ConfigurationValid")
    assert (valid["status"], valid["reason"]) == ("False", "ForbiddenByPolicy")
    assert (world.pods("a"), world.kube.items(world.path(APPS, "statefulsets"))) == ([], [])
    sidecar = {"name": "side", "image": "busybox", "securityContext": SAYS}
    world.edit("a", {"trainer": {"podTemplate": {"spec": {**dict.fromkeys(asked), "containers": [sidecar]}}}})
    world.wait_pods_ready("a", 2)


def to_policy_path(path: str) -> str:
    """Return a path in the form of the policy's messages."""
    path = re.sub(r"^(trainer|inference|orchestrator)\b", "ROLE", path)
    return "spec." + re.sub(r"\[\d+\]", "[]", path)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_api_server_and_operator_agree(worlds: dict[str, World], case: Case) -> None:
    (name,) = (name for name, policy in POLICIES.items() if policy is case.policy)
    answer = try_create(worlds[name], case.spec)
    if not case.refused:
        assert answer["kind"] == "RLRun", answer["message"]
        return
    assert answer["kind"] == "Status", "it is allowed"
    message = answer["message"]
    assert "ValidatingAdmissionPolicy" in message, message
    if case.name in OF_ANOTHER_TYPE:
        assert "resulted in error" in message, message
    else:
        told = message.partition("denied request: ")[2].partition(" is not allowed by this installation")[0]
        assert any(to_policy_path(path).startswith(told) for path in case.refused), message


def test_large_run_stays_within_cel_budget(worlds: dict[str, World]) -> None:
    secret = {"secretKeyRef": {"name": "for-rlrun-hub", "key": "a"}}
    env = [{"name": f"V{i}", "valueFrom": secret} for i in range(128)]
    volumes = [{"name": f"v{i}", "secret": {"secretName": "for-rlrun-hub"}} for i in range(100)]
    mounts = [{"name": f"v{i}", "mountPath": f"/v{i}"} for i in range(100)]

    def block(role: str) -> dict[str, Any]:
        container = {"name": role, "env": env, "volumeMounts": mounts}
        return {"env": env, "podTemplate": {"spec": {"volumes": volumes, "containers": [container]}}}

    spec = {role: block(role) for role in ("trainer", "inference", "orchestrator")}
    spec["orchestrator"]["batchSize"] = 16
    for name in ("defaults", "lists"):
        answer = try_create(worlds[name], spec)
        assert answer["kind"] == "RLRun", answer["message"]


@pytest.mark.parametrize("field", ["serviceAccountName", "serviceAccount"])
def test_operator_account_is_always_refused(cluster: Cluster, field: str) -> None:
    with fresh_namespace(cluster) as namespace:
        install(cluster, "own", EVERYTHING, namespace, own=True)
        world, spec = World(cluster, namespace), pod("orchestrator", **{field: ACCOUNT})
        wait_enforced(world, spec)
        assert "the operator's own account" in try_create(world, spec)["message"]
        assert try_create(world, pod("orchestrator", **{field: "other"}))["kind"] == "RLRun"
        cluster.helm("uninstall", "own", "--namespace", namespace)


def test_run_older_than_policy_can_be_suspended(cluster: Cluster, namespace: str) -> None:
    world = World(cluster, namespace)
    world.create("old", **pod(hostNetwork=True))
    install(cluster, "late", DEFAULTS, namespace)
    wait_enforced(world, pod(hostNetwork=True))
    world.edit("old", {"suspend": True})
    world.kube("PATCH", world.path(RUNS, "rlruns", "old"), {"metadata": {"labels": {"a": "b"}}})
    answer = world.kube("PATCH", world.path(RUNS, "rlruns", "old"), {"spec": pod(hostPID=True)}, ok=False)
    assert "podTemplate.spec.host" in answer["message"], answer
    world.edit("old", {"trainer": {"podTemplate": None}})
    cluster.helm("uninstall", "late", "--namespace", f"{SYSTEM}-late")


@pytest.mark.parametrize(
    ("role", "may"),
    [
        ("view", {"get", "list", "watch"}),
        ("edit", {"get", "list", "watch", "create", "update", "patch", "delete"}),
        ("admin", {"get", "list", "watch", "create", "update", "patch", "delete"}),
        ("rlrun-edit", {"create", "update", "patch", "delete"}),
    ],
)
def test_builtin_roles_include_runs(cluster: Cluster, namespace: str, role: str, may: set[str]) -> None:
    world = World(cluster, namespace)
    cluster.kubectl("create", "rolebinding", "ann", "-n", namespace, f"--clusterrole={role}", "--user=ann")

    def allowed(verb: str, resource: str = "rlruns", subresource: str = "") -> bool:
        asked = {
            "namespace": namespace,
            "verb": verb,
            "group": "rlrun.io",
            "resource": resource,
            "subresource": subresource,
        }
        body = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SubjectAccessReview",
            "spec": {"user": "ann", "resourceAttributes": asked},
        }
        return bool(world.kube("POST", "/apis/authorization.k8s.io/v1/subjectaccessreviews", body)["status"]["allowed"])

    def verbs() -> set[str]:
        return {verb for verb in ("get", "list", "watch", "create", "update", "patch", "delete") if allowed(verb)}

    wait_for(lambda: sorted(verbs()), lambda seen: set(seen) == may, "the roles are aggregated")
    assert not allowed("patch", subresource="status"), "the status is the operator's"
