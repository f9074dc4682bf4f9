"""Replacement of a run's API key after its Secret is deleted or a rotation is requested."""

from __future__ import annotations

import pytest

from rlrun_operator.names import ROLE_LABEL, ROTATE_ANNOTATION
from rlrun_operator.times import format_rfc3339
from tests.controlplane.harness import wait_for
from tests.controlplane.world import CORE, RUNS, World

pytestmark = pytest.mark.full

NOW = format_rfc3339(1_800_000_000.0)


def first_key(world: World, name: str) -> str:
    return f"{name}-key-{world.run(name)['metadata']['uid'][:8]}"


def keys(world: World, name: str) -> dict[str, set[str]]:
    """Return the Secrets that the run's pods refer to, by role."""
    found: dict[str, set[str]] = {}
    for pod in world.pods(name):
        variables = {v["name"]: v for v in pod["spec"]["containers"][0]["env"]}
        secret = variables["RLRUN_API_KEY"]["valueFrom"]["secretKeyRef"]["name"]
        found.setdefault(pod["metadata"]["labels"][ROLE_LABEL], set()).add(secret)
    return found


def wait_keys(world: World, name: str, secret: str) -> None:
    wanted = {role: {secret} for role in ("trainer", "inference", "orchestrator")}
    wait_for(lambda: keys(world, name), lambda found: found == wanted, f"all pods of {name} name {secret}")


def exists(world: World, secret: str) -> bool:
    return any(s["metadata"]["name"] == secret for s in world.kube.items(world.path(CORE, "secrets")))


def test_lost_secret_gives_next_attempt_new_key(world: World) -> None:
    world.start("lost")
    first = first_key(world, "lost")
    wait_keys(world, "lost", first)
    world.delete("secrets", first)
    world.end_container("lost-trainer-0", 1)
    status = world.wait_phase("lost", "Starting", attempt=2)
    wait_keys(world, "lost", f"{first}-2")
    assert exists(world, f"{first}-2")
    assert status["keyAttempt"] == 2
    assert world.wait_event("lost", "KeyLost").count("KeyLost") == 1


def test_pod_without_its_lost_secret_ends_attempt(world: World) -> None:
    """The test writes the pod status, because there is no kubelet."""
    world.start("waits")
    first = first_key(world, "waits")
    world.delete("secrets", first)
    engine = next(p for p in world.pods("waits") if p["metadata"]["labels"][ROLE_LABEL] == "inference")
    waiting = {"reason": "CreateContainerConfigError", "message": f'secret "{first}" not found'}
    world._set_status(engine["metadata"]["name"], {}, {"state": {"waiting": waiting}, "ready": False})
    failure = world.wait_phase("waits", "Starting", attempt=2)["lastFailure"]
    assert (failure["reason"], failure["role"], failure["counted"]) == ("KeyLost", "inference", False)
    wait_keys(world, "waits", f"{first}-2")


def test_rotation_annotation_renews_key_of_all_roles(world: World) -> None:
    world.start("rotates")
    first = first_key(world, "rotates")
    metadata = {"metadata": {"annotations": {ROTATE_ANNOTATION: NOW}}}
    world.kube("PATCH", world.path(RUNS, "rlruns", "rotates"), metadata)
    status = world.wait_phase("rotates", "Starting", attempt=2)
    wait_keys(world, "rotates", f"{first}-2")
    assert (status["keyRotationRequestedAt"], status["restartsCountedTowardsMax"]) == (NOW, 0)
    assert world.wait_event("rotates", "KeyRotationRequested").count("KeyRotationRequested") == 1
    assert exists(world, first), "it opens nothing any more, and goes with the run"
