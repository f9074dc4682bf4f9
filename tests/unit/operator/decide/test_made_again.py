"""A run that is deleted and applied again at once, while the children of the old one are still on their way out."""

from __future__ import annotations

import pytest

from rlrun_operator.kube.client import ApiError
from rlrun_operator.names import RUN_UID_ANNOTATION, Names, Ref
from rlrun_operator.status import reasons
from rlrun_operator.times import rfc3339
from tests.unit.operator.decide.kube import Kube

CLAIM = Ref("PersistentVolumeClaim", "run-data")


def test_nothing_begins_on_a_claim_that_is_being_deleted() -> None:
    kube = Kube()
    kube.objects[CLAIM] = {
        "kind": "PersistentVolumeClaim",
        "metadata": {
            **{"name": "run-data", "uid": "old", "deletionTimestamp": "2026-01-01T00:00:00Z"},
            "labels": {"rlrun.io/run": "run"},
        },
        "status": {"phase": "Bound"},
    }
    decision = kube.decide()
    assert not decision.apply
    assert not decision.create
    assert decision.wake_in is not None
    kube.do(decision)
    assert kube.condition("Scheduled")["reason"] == reasons.PREVIOUS_RUN_ENDING
    assert "PersistentVolumeClaim run-data" in kube.condition("Scheduled")["message"]
    del kube.objects[CLAIM]
    assert kube.decide().apply


def claim(kube: Kube, **metadata: str) -> None:
    kube.objects[CLAIM]["metadata"] |= metadata


def test_a_mended_run_that_waits_for_a_namesake_to_go_is_not_failed_for_ever() -> None:
    kube = Kube({"trainer": {"replicas": 0}})
    kube.tick(1)
    assert kube.status["phase"] == "Failed"
    kube.taken = "Service run-trainer"
    kube.edit(trainer={"replicas": 1})
    kube.tick(1)
    assert (kube.status["phase"], kube.condition("Failed")["reason"]) == ("Pending", reasons.NOT_FAILED)
    assert "completionTime" not in kube.status
    kube.taken = None
    kube.start()
    assert kube.status["phase"] == "Running"


def test_a_claim_that_went_before_a_pod_could_use_it_is_made_again() -> None:
    kube = Kube()
    kube.schedule = False
    kube.tick(3)
    assert kube.status["launchedAttempt"] == 1
    del kube.objects[CLAIM]
    kube.tick(3)
    assert CLAIM in kube.objects
    assert kube.status["attempt"] == 1


def test_engines_that_hold_a_deleted_claim_go_and_the_next_attempt_begins_on_a_new_one() -> None:
    kube = Kube().start()
    claim(kube, deletionTimestamp=rfc3339(kube.now))
    kube.tick(3)
    assert kube.status["phase"] == "Running", "what holds it works on"
    kube.delete(kube.ref("trainer"))
    kube.tick(8)
    assert not kube.pods("inference")
    assert kube.condition("Restarting")["reason"] == reasons.CLAIM_DELETED
    del kube.objects[CLAIM]
    kube.tick(8)
    assert "deletionTimestamp" not in kube.objects[CLAIM]["metadata"]
    assert kube.status["attempt"] == 2
    assert kube.pods("inference")


def test_an_attempt_whose_pods_a_deleted_claim_does_not_take_begins_anew() -> None:
    kube = Kube()
    kube.place = lambda pod: "node-1" if "inference" in pod["metadata"]["name"] else None
    kube.tick(3)
    claim(kube, deletionTimestamp=rfc3339(kube.now))
    kube.tick(8)
    assert kube.status["lastFailure"]["reason"] == reasons.CLAIM_DELETED
    assert kube.status["restartsCountedTowardsMax"] == 0
    assert not kube.pods("inference"), "they would hold it for ever"


def remade(old: Kube) -> Kube:
    """The run, deleted and made again in this very second; of the old one only the pods are left."""
    kube = Kube(uid="uid-of-another")
    kube.now = old.now
    kube.run["metadata"]["creationTimestamp"] = old.pod("trainer")["metadata"]["creationTimestamp"]
    kube.objects = {ref: found for ref, found in old.objects.items() if ref.kind == "Pod"}
    return kube


def without_uid(kube: Kube) -> Kube:
    """As an operator had made it that did not write whose its pods are: a StatefulSet's and a Deployment's pods say nothing of it."""
    templates = [
        found["spec"]["template"] for ref, found in kube.objects.items() if ref.kind in ("StatefulSet", "Deployment")
    ]
    for found in (*kube.pods("trainer"), *kube.pods("inference"), *kube.pods("orchestrator"), *templates):
        del found["metadata"]["annotations"][RUN_UID_ANNOTATION]
    return kube


@pytest.mark.parametrize("role", ["trainer", "inference", "orchestrator"])
def test_a_pod_is_not_taken_over_because_it_is_as_young_as_the_run(role: str) -> None:
    kube = remade(Kube().start())
    kube.objects = {ref: found for ref, found in kube.objects.items() if ref == kube.ref(role)}
    kube.tick(0)
    assert (kube.status["phase"], kube.status.get("attempt", 0)) == ("Pending", 0)
    assert f"Pod {kube.ref(role).name}" in kube.condition("Scheduled")["message"]
    kube.objects.clear()
    kube.tick()
    assert (kube.status["phase"], kube.attempts_of_trainers()) == ("Starting", {"1"})


def test_an_orchestrator_that_says_nothing_else_is_its_owners() -> None:
    kube = remade(without_uid(Kube().start()))
    assert "Pod run-orchestrator-1" in kube.decide().status["message"]


def test_pods_of_before_an_upgrade_are_told_by_their_age_and_left_alone() -> None:
    kube = without_uid(Kube().start())
    before = {ref: found["metadata"]["uid"] for ref, found in kube.objects.items()}
    kube.tick()
    assert {ref: found["metadata"]["uid"] for ref, found in kube.objects.items()} == before
    assert (kube.status["phase"], kube.status["attempt"], kube.rendered_again) == ("Running", 1, [])
    kube.exit("trainer", 1)
    for _ in range(3):
        kube.tick()
    assert (kube.status["attempt"], kube.attempts_of_trainers()) == (2, {"2"})
    later = remade(without_uid(Kube().start()))
    later.run["metadata"]["creationTimestamp"] = rfc3339(later.now + 60)
    assert "Pod run-trainer-0" in later.decide().status["message"]


def test_the_key_of_the_old_run_is_not_taken_for_the_new_ones() -> None:
    names = Names("run")
    assert names.secret("11111111-aaaa") != names.secret("22222222-aaaa")


@pytest.mark.parametrize(
    ("message", "refused"),
    [
        ("spec.x: Invalid value", True),
        ('Only one reference can have Controller set to true. Found "true" in two', False),
    ],
)
def test_a_child_that_belongs_to_the_old_run_is_tried_again(message: str, refused: bool) -> None:
    assert ApiError(422, "Invalid", message, "apply services/run-trainer").refused is refused


def test_a_complete_run_waits_for_nothing() -> None:
    kube = Kube().start()
    kube.report(100, **{"waiting-on": "the last checkpoint"})
    kube.tick()
    kube.exit("orchestrator", 0)
    for _ in range(3):
        kube.tick()
    assert kube.status["phase"] == "Complete"
    assert "waitingOn" not in kube.status["progress"]


@pytest.mark.parametrize("taken", [None, "Service run-trainer"])
@pytest.mark.parametrize("attempt", [1, 2])
def test_an_attempt_that_is_made_and_not_on_record_goes_there_whatever_else_is_refused(
    attempt: int, taken: str | None
) -> None:
    """What it was begun with is not asked for again: a refusal would keep it off the record, and its failures unseen."""
    kube = Kube()
    if attempt == 2:
        kube.start()
        kube.exit("trainer", code=1)
        kube.do(kube.decide())
        kube.lingering = set()
        while (decision := kube.decide()).status["attempt"] == 1:
            kube.do(decision)
            kube.controllers()
            kube.now += 1
    decision = kube.decide()
    kube.do(decision, stop_after=len((*decision.create, *decision.apply)))  # and the operator dies
    kube.taken = taken
    made = kube.decide()
    assert (made.create, made.apply, made.dry_run, made.repair) == ((), (), (), ())
    assert (made.status["phase"], made.status["attempt"], made.status["launchedAttempt"]) == (
        "Starting",
        attempt,
        attempt,
    )
