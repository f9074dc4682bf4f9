"""Run that is deleted and recreated immediately, while children of the old run still exist."""

from __future__ import annotations

import pytest

from rlrun_operator.kube.client import ApiError
from rlrun_operator.names import RUN_UID_ANNOTATION, Names, Ref
from rlrun_operator.status import reasons
from rlrun_operator.times import format_rfc3339
from tests.unit.operator.decide.kube import Kube

CLAIM = Ref("PersistentVolumeClaim", "run-data")


def test_run_waits_for_the_deletion_of_its_old_claim() -> None:
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


def edit_claim(kube: Kube, **metadata: str) -> None:
    kube.objects[CLAIM]["metadata"] |= metadata


def test_corrected_run_waiting_for_a_name_is_not_failed() -> None:
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


def test_claim_deleted_before_use_is_recreated() -> None:
    kube = Kube()
    kube.schedule = False
    kube.tick(3)
    assert kube.status["launchedAttempt"] == 1
    del kube.objects[CLAIM]
    kube.tick(3)
    assert CLAIM in kube.objects
    assert kube.status["attempt"] == 1


def test_deleted_claim_stops_engines_before_the_next_attempt() -> None:
    kube = Kube().start()
    edit_claim(kube, deletionTimestamp=format_rfc3339(kube.now))
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


def test_claim_deletion_restarts_an_unscheduled_attempt() -> None:
    kube = Kube()
    kube.place = lambda pod: "node-1" if "inference" in pod["metadata"]["name"] else None
    kube.tick(3)
    edit_claim(kube, deletionTimestamp=format_rfc3339(kube.now))
    kube.tick(8)
    assert kube.status["lastFailure"]["reason"] == reasons.CLAIM_DELETED
    assert kube.status["restartsCountedTowardsMax"] == 0
    assert not kube.pods("inference"), "they would hold it for ever"


def remake_run(old: Kube) -> Kube:
    """Run deleted and recreated within the same second; of the old one only the pods remain."""
    kube = Kube(uid="uid-of-another")
    kube.now = old.now
    kube.run["metadata"]["creationTimestamp"] = old.pod("trainer")["metadata"]["creationTimestamp"]
    kube.objects = {ref: found for ref, found in old.objects.items() if ref.kind == "Pod"}
    return kube


def remove_run_uid(kube: Kube) -> Kube:
    """Remove the run's UID from pods of workloads, as created by earlier releases."""
    templates = [
        found["spec"]["template"] for ref, found in kube.objects.items() if ref.kind in ("StatefulSet", "Deployment")
    ]
    for found in (*kube.pods("trainer"), *kube.pods("inference"), *kube.pods("orchestrator"), *templates):
        del found["metadata"]["annotations"][RUN_UID_ANNOTATION]
    return kube


@pytest.mark.parametrize("role", ["trainer", "inference", "orchestrator"])
def test_pod_as_young_as_the_run_is_not_adopted(role: str) -> None:
    kube = remake_run(Kube().start())
    kube.objects = {ref: found for ref, found in kube.objects.items() if ref == kube.ref(role)}
    kube.tick(0)
    assert (kube.status["phase"], kube.status.get("attempt", 0)) == ("Pending", 0)
    assert f"Pod {kube.ref(role).name}" in kube.condition("Scheduled")["message"]
    kube.objects.clear()
    kube.tick()
    assert (kube.status["phase"], kube.attempts_of_trainers()) == ("Starting", {"1"})


def test_orchestrator_without_annotation_belongs_to_its_owner() -> None:
    kube = remake_run(remove_run_uid(Kube().start()))
    assert "Pod run-orchestrator-1" in kube.decide().status["message"]


def test_pods_from_before_upgrade_are_matched_by_age() -> None:
    kube = remove_run_uid(Kube().start())
    before = {ref: found["metadata"]["uid"] for ref, found in kube.objects.items()}
    kube.tick()
    assert {ref: found["metadata"]["uid"] for ref, found in kube.objects.items()} == before
    assert (kube.status["phase"], kube.status["attempt"], kube.rendered_again) == ("Running", 1, [])
    kube.exit("trainer", 1)
    for _ in range(3):
        kube.tick()
    assert (kube.status["attempt"], kube.attempts_of_trainers()) == (2, {"2"})
    later = remake_run(remove_run_uid(Kube().start()))
    later.run["metadata"]["creationTimestamp"] = format_rfc3339(later.now + 60)
    assert "Pod run-trainer-0" in later.decide().status["message"]


def test_secret_name_differs_for_a_recreated_run() -> None:
    names = Names("run")
    assert names.key_secret("11111111-aaaa") != names.key_secret("22222222-aaaa")


@pytest.mark.parametrize(
    ("message", "refused"),
    [
        ("spec.x: Invalid value", True),
        ('Only one reference can have Controller set to true. Found "true" in two', False),
    ],
)
def test_conflict_with_child_of_old_run_is_retried(message: str, refused: bool) -> None:
    assert ApiError(422, "Invalid", message, "apply services/run-trainer").refused is refused


def test_complete_run_has_no_waiting_reason() -> None:
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
def test_created_attempt_is_recorded_despite_other_refusals(attempt: int, taken: str | None) -> None:
    """Otherwise a refused dry run would keep the attempt unrecorded, and its failures undetected."""
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
    kube.do(decision, stop_after=len((*decision.create, *decision.apply)))  # the operator is killed here
    kube.taken = taken
    made = kube.decide()
    assert (made.create, made.apply, made.dry_run, made.repair) == ((), (), (), ())
    assert (made.status["phase"], made.status["attempt"], made.status["launchedAttempt"]) == (
        "Starting",
        attempt,
        attempt,
    )
