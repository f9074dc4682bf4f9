"""A run that is deleted and applied again at once, while the children of the old one are still on their way out."""

from __future__ import annotations

import pytest

from rlrun_operator import reasons
from rlrun_operator.client import ApiError
from rlrun_operator.names import Names, Ref
from tests.unit.operator.decide.kube import Kube

CLAIM = Ref("PersistentVolumeClaim", "run-data")


def test_nothing_begins_on_a_claim_that_is_being_deleted() -> None:
    kube = Kube()
    kube.objects[CLAIM] = {
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": "run-data", "uid": "old", "deletionTimestamp": "2026-01-01T00:00:00Z"},
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
