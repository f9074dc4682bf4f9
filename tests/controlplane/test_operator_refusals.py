"""Operator writes that a real ValidatingAdmissionPolicy refuses: the status has message and fix, and other work
continues."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from rlrun_operator.names import ROLE_LABEL
from tests.controlplane.harness import Json, wait_for
from tests.controlplane.world import APPS, CORE, LEASES, World

pytestmark = pytest.mark.full

ADMISSION = "/apis/admissionregistration.k8s.io/v1"
SIZES = "object == null || oldObject == null || object.spec.replicas == oldObject.spec.replicas"


@contextmanager
def policy(
    world: World, group: str, resource: str, operation: str, allowed: str, probe: tuple[str, str, Json]
) -> Iterator[str]:
    """Install a policy in the world's namespace; yield its name.

    Args:
        world: namespace under test.
        group: API group of the judged objects.
        resource: plural of the judged objects.
        operation: CREATE, UPDATE or DELETE.
        allowed: CEL expression.
        probe: method, path and body of a request that the policy refuses once the API server applies it.
    """
    name = f"keeps-{resource}-{world.namespace}"
    rules = [{"apiGroups": [group], "apiVersions": ["v1"], "operations": [operation], "resources": [resource]}]
    spec = {
        "failurePolicy": "Fail",
        "matchConstraints": {"resourceRules": rules},
        "validations": [{"expression": allowed, "message": "ask the platform team"}],
    }
    here = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": world.namespace}}}
    binding = {"policyName": name, "validationActions": ["Deny"], "matchResources": here}
    world.kube("POST", f"{ADMISSION}/validatingadmissionpolicies", {"metadata": {"name": name}, "spec": spec})
    try:
        world.kube(
            "POST", f"{ADMISSION}/validatingadmissionpolicybindings", {"metadata": {"name": name}, "spec": binding}
        )
        method, path, body = probe
        wait_for(
            lambda: world.kube(method, f"{path}?dryRun=All", body, ok=False),
            lambda answer: "ask the platform team" in str(answer.get("message")),
            "the policy counts",
        )
        yield name
    finally:
        world.kube("DELETE", f"{ADMISSION}/validatingadmissionpolicybindings/{name}", ok=False)
        world.kube("DELETE", f"{ADMISSION}/validatingadmissionpolicies/{name}", ok=False)


def wait_condition(world: World, kind: str, status: str, reason: str, *words: str) -> None:
    wait_for(
        lambda: world.condition("a", kind),
        lambda found: (
            (found.get("status"), found.get("reason")) == (status, reason)
            and all(word in found["message"] for word in words)
        ),
        f"{kind}={status}, {reason}: {', '.join(words)}",
    )


def test_refused_scale_down_is_reported_and_retried(world: World) -> None:
    world.start("a")
    probe = ("PATCH", world.path(APPS, "statefulsets", "a-trainer"), {"spec": {"replicas": 7}})
    with policy(world, "apps", "statefulsets", "UPDATE", SIZES, probe) as name:
        world.edit("a", {"suspend": True})
        words = (
            "StatefulSet a-trainer cannot be scaled to 0: ",
            f"ValidatingAdmissionPolicy '{name}'",
            "ask the platform team",
        )
        wait_condition(world, "ChildrenIntact", "False", "AdmissionRefused", *words, "the operator retries")
        status = world.wait_phase("a", "Suspending")
        assert all(word in status["message"] for word in words)
        world.wait_event("a", "AdmissionRefused")
    world.wait_phase("a", "Suspended")
    wait_condition(world, "ChildrenIntact", "True", "Repaired", "let in again")


def test_refused_deployment_does_not_delay_lease_repair(world: World) -> None:
    world.start("a")
    template = {"metadata": {"labels": {"app": "x"}}, "spec": {"containers": [{"name": "x", "image": "x"}]}}
    spec = {"replicas": 0, "selector": {"matchLabels": {"app": "x"}}, "template": template}
    probe = ("POST", world.path(APPS, "deployments"), {"metadata": {"name": "probe"}, "spec": spec})
    with policy(world, "apps", "deployments", "CREATE", "false", probe) as name:
        world.delete("deployments", "a-inference", APPS)
        world.delete("leases", "a-progress", LEASES)
        world.wait_told("a", f"Deployment a-inference cannot be created: .*{name}")
        wait_for(
            lambda: world.kube("GET", world.path(LEASES, "leases", "a-progress"), ok=False),
            lambda found: found.get("kind") == "Lease",
            "the Lease is made again",
        )
    wait_for(
        lambda: world.kube("GET", world.path(APPS, "deployments", "a-inference"), ok=False),
        lambda found: found.get("kind") == "Deployment",
        "the Deployment is made again",
    )


def test_refused_key_secret_is_reported_while_pod_waits(world: World) -> None:
    """The test writes the pod status, because there is no kubelet."""
    world.start("a")
    secret = f"a-key-{world.run('a')['metadata']['uid'][:8]}"
    probe = ("POST", world.path(CORE, "secrets"), {"metadata": {"name": "probe"}})
    with policy(world, "", "secrets", "CREATE", "false", probe) as name:
        world.delete("secrets", secret)
        engine = next(p for p in world.pods("a") if p["metadata"]["labels"][ROLE_LABEL] == "inference")
        waiting = {"reason": "CreateContainerConfigError", "message": f'secret "{secret}" not found'}
        world._set_status(engine["metadata"]["name"], {}, {"state": {"waiting": waiting}, "ready": False})
        wait_condition(
            world, "ChildrenIntact", "False", "AdmissionRefused", f"Secret {secret} cannot be looked for: ", name
        )
        assert world.status("a")["attempt"] == 1
    failure = world.wait_phase("a", "Starting", attempt=2)["lastFailure"]
    assert failure["reason"] == "KeyLost"
