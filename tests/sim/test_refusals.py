"""Histories in which admission refuses one object: the status shows the refusal with its fix, and independent work
continues.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from rlrun_operator.kube.resources import LEASE
from tests.sim.cluster.admission import Refusal, RefusedError
from tests.sim.world import World

MARK = "rule-900"


def _refuse(world: World, kind: str, sort: str = "policy") -> None:
    world.api.refusals.append(Refusal(MARK, sort, kind))


def _said(world: World, kind: str) -> tuple[str, str, str]:
    found = next(c for c in world.status["conditions"] if c["type"] == kind)
    return found["status"], found["reason"], found["message"]


def _trains(seed: int = 1) -> World:
    world = World(seed=seed)
    world.calm(12)
    assert world.status["phase"] == "Running"
    return world


def test_refused_scale_down_is_reported_and_retried() -> None:
    world = _trains()
    _refuse(world, "StatefulSet")
    world.edit(suspend=True)
    world.stand()
    assert world.status["phase"] == "Suspending"
    words = 'StatefulSet run-trainer cannot be scaled to 0: statefulsets "run-trainer" is forbidden: ValidatingAdmissionPolicy'
    for text in (world.status["message"], _said(world, "ChildrenIntact")[2]):
        assert f"{words} '{MARK}'" in text
        assert "change the policy or webhook that refuses it; the operator retries" in text
    assert _said(world, "ChildrenIntact")[:2] == ("False", "AdmissionRefused")
    assert world.cluster.pod("orchestrator", -1) is None, "its removal does not depend on the trainer's"
    world.lift(world.api.refusals)
    world.stand()
    assert world.status["phase"] == "Suspended"
    assert _said(world, "ChildrenIntact")[:2] == ("True", "Repaired")


@pytest.mark.parametrize("mark", ["rule-900", "rule-901", "rule-902", "rule-903"])
def test_webhook_refusal_with_any_status_is_reported(mark: str) -> None:
    """Each mark has another status: here 409 is no conflict, 404 no missing object and 500 no outage."""
    world = _trains()
    for kind in ("StatefulSet", "Deployment", "Pod"):
        world.api.refusals.append(Refusal(mark, "webhook", kind))
    world.edit(suspend=True)
    world.stand()
    assert world.status["phase"] == "Suspending"
    message, denied = _said(world, "ChildrenIntact")[2], f'admission webhook "{mark}.example.com" denied'
    assert f"StatefulSet run-trainer cannot be scaled to 0: {denied}" in message
    assert f"Pod run-orchestrator-1 cannot be deleted: {denied}" in message
    assert world.cluster.pod("orchestrator", -1) is not None, "what may not be deleted is not taken for gone"
    world.lift(world.api.refusals)
    world.stand()
    assert world.status["phase"] == "Suspended"
    assert mark not in str(world.status)


def test_refused_spot_deployment_is_reported() -> None:
    world = World(seed=1, engines=True)
    world.calm(12)
    assert world.status["phase"] == "Running"
    _refuse(world, "Deployment", "policy")
    world.api.drop("Deployment", "run-inference-spot")
    world.stand()
    assert world.status["phase"] == "Running"
    assert MARK in " ".join(condition["message"] for condition in world.status["conditions"])
    world.lift(world.api.refusals)
    world.stand()
    assert MARK not in str(world.status)


def test_refused_engine_deletion_is_reported() -> None:
    world = _trains()
    _refuse(world, "Deployment", "webhook")
    world.edit(suspend=True)
    world.stand()
    assert world.status["phase"] == "Suspending"
    assert "Deployment run-inference cannot be deleted: admission webhook" in world.status["message"]
    world.lift(world.api.refusals)
    world.stand()
    assert world.status["phase"] == "Suspended"


def test_refused_engine_scaling_is_reported_while_running() -> None:
    world = _trains()
    _refuse(world, "Deployment", "webhook away")
    world.edit(inference={"replicas": 2})
    world.stand()
    status, reason, message = _said(world, "ChildrenIntact")
    assert (world.status["phase"], status, reason) == ("Running", "False", "AdmissionRefused")
    assert message.startswith(
        "Deployment run-inference cannot be scaled to 2: Internal error occurred: failed calling webhook"
    )
    world.lift(world.api.refusals)
    world.stand()
    assert _said(world, "ChildrenIntact")[0] == "True"
    assert MARK not in str(world.status)


def test_refused_scale_down_is_reported_during_restart() -> None:
    world = _trains()
    _refuse(world, "StatefulSet", "webhook")
    pod = world.cluster.pod("trainer", 0)
    assert pod is not None
    world.cluster.exit(pod, 1)
    world.stand()
    assert world.status["phase"] == "Restarting"
    assert "waiting for its pods to be gone" in world.status["message"]
    assert "StatefulSet run-trainer cannot be scaled to 0: admission webhook" in world.status["message"]
    world.lift(world.api.refusals)
    world.rest()
    assert (world.status["phase"], world.status["attempt"]) == ("Running", 2)


def test_refused_deployment_does_not_block_other_repairs() -> None:
    world = _trains()
    _refuse(world, "Deployment")
    world.api.drop("Deployment", "run-inference")
    world.api.drop(LEASE.kind, "run-progress")
    service = next(one for one in world.api.all("Service"))
    world.api.drop("Service", service["metadata"]["name"])
    trainer = world.api.get("StatefulSet", "run-trainer")
    assert trainer is not None
    world.api.put(trainer, spec=trainer["spec"] | {"replicas": 3})
    before = world.status["progress"]["step"]
    world.stand()
    assert world.api.get(LEASE.kind, "run-progress") is not None
    assert world.api.get("Service", service["metadata"]["name"]) is not None
    assert (world.api.get("StatefulSet", "run-trainer") or {})["spec"]["replicas"] == 2
    assert MARK in _said(world, "Scheduled")[2]
    assert world.status["progress"]["step"] >= before
    world.lift(world.api.refusals)
    world.rest()
    assert world.status["phase"] == "Running"


@pytest.mark.parametrize("kind", ["PersistentVolumeClaim", "ConfigMap", "StatefulSet", "Deployment"])
def test_refused_object_blocks_only_its_dependents(kind: str) -> None:
    world = World(seed=1)
    _refuse(world, kind)
    world.stand()
    rest = {"PersistentVolumeClaim", "Lease", "Secret", "ConfigMap", "ServiceAccount", "RoleBinding"} - {kind}
    made = {each for each in rest if world.api.all(each)}
    assert made == rest
    depends: Sequence[str] = ("StatefulSet", "Deployment", "Pod")
    held = depends[depends.index(kind) :] if kind in depends else depends
    assert [
        each for each in held if world.api.all(each) and (each != "Pod" or world.cluster.pods("orchestrator"))
    ] == []
    assert MARK in world.status["message"]
    assert world.status["phase"] == "Pending"
    world.lift(world.api.refusals)
    world.rest()
    assert world.status["phase"] == "Running"


@pytest.mark.parametrize("sort", ["webhook", "policy", "webhook away", "invalid"])
def test_refused_key_secret_is_reported_while_pod_waits(sort: str) -> None:
    world = _trains()
    (secret,) = world.api.all("Secret")
    world.api.drop("Secret", secret["metadata"]["name"])
    _refuse(world, "Secret", sort)
    engine = world.cluster.pods("inference")[0]
    world.api.drop("Pod", engine["metadata"]["name"])
    world.stand()
    assert f"Secret {secret['metadata']['name']} cannot be looked for: " in _said(world, "ChildrenIntact")[2]
    assert MARK in _said(world, "ChildrenIntact")[2]
    world.api.refusals.clear()
    world.stand()
    world.rest()
    assert (world.status["phase"], world.status["attempt"]) == ("Running", 2), "the next attempt has another key"
    assert MARK not in str(world.status)


def test_varying_refusal_messages_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(seed=1)
    count = iter(range(10_000))

    def check(self: Refusal, kind: str, name: str, **how: bool) -> None:
        if kind == "StatefulSet":
            raise RefusedError(
                400, "BadRequest", f'admission webhook "{MARK}" denied the request: number {next(count)}'
            )

    monkeypatch.setattr(Refusal, "check", check)
    _refuse(world, "StatefulSet")
    world.stand()
    assert MARK in world.status["message"]
