"""A real ValidatingAdmissionPolicy refuses one write of the operator: the status has its words and the fix, and the rest is done."""

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
    """A policy for the world's namespace; its name.

    Args:
        world: the namespace.
        group: API group of what it judges.
        resource: plural of that.
        operation: CREATE, UPDATE or DELETE.
        allowed: CEL expression.
        probe: method, path and body of a request that it refuses; by that it is known that the API server has taken it up.
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


def test_a_trainer_that_may_not_be_scaled_down_is_told_and_suspends_once_it_may(world: World) -> None:
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


def test_while_a_lost_deployment_is_refused_a_lost_lease_comes_back(world: World) -> None:
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


def test_a_key_that_cannot_be_asked_for_is_told_while_a_pod_waits_for_it(world: World) -> None:
    """No kubelet works here: the pod says what one would."""
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
