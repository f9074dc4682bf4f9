"""Refused writes to existing objects: reported by ChildrenIntact and by the conditions that wait for them."""

from __future__ import annotations

import pytest

from rlrun_operator.kube.client import ApiError
from rlrun_operator.names import Ref
from rlrun_operator.reconcile.run_memory import events_of, request_refused
from rlrun_operator.state import MADE, Refusal
from tests.unit.operator.decide.kube import Kube

POLICY = "ValidatingAdmissionPolicy 'fixed' with binding 'all' denied request: sizes are fixed"
RIGHT = 'statefulsets.apps "run-trainer" is forbidden: User "sa" cannot patch resource "statefulsets"'
RETRIED = "change the policy or webhook that refuses it; the operator retries"
TRAINER, ENGINES, SERVICE = (
    Ref("StatefulSet", "run-trainer"),
    Ref("Deployment", "run-inference"),
    Ref("Service", "run-trainer"),
)


def read_condition(kube: Kube, kind: str = "ChildrenIntact") -> tuple[str, str, str]:
    found = kube.condition(kind)
    return found["status"], found["reason"], found["message"]


@pytest.mark.parametrize(
    ("text", "fix"),
    [
        (POLICY, RETRIED),
        (RIGHT, "the operator's Role lacks this right: a helm upgrade of its chart grants it; the operator retries"),
        (
            'user "sa" (groups=["all"]) is attempting to grant RBAC permissions not currently held: {APIGroups:[""]}',
            "the operator's Role lacks this right: a helm upgrade of its chart grants it; the operator retries",
        ),
        (
            'Internal error occurred: failed calling webhook "guard": context deadline exceeded',
            "repair that webhook, or remove its configuration; the operator retries",
        ),
    ],
)
def test_refused_write_is_reported_with_fix_until_it_ends(text: str, fix: str) -> None:
    kube = Kube().start()
    kube.refused = (Refusal(ENGINES, text, "be scaled to 2"),)
    kube.tick()
    assert read_condition(kube) == (
        "False",
        "AdmissionRefused",
        f"Deployment run-inference cannot be scaled to 2: {text}; {fix}",
    )
    assert ("Warning", "AdmissionRefused") in kube.told
    assert kube.status["phase"] == "Running"
    kube.refused = ()
    kube.tick()
    assert read_condition(kube) == (
        "True",
        "Repaired",
        "everything that the operator writes of this run is let in again",
    )


def test_refused_writes_are_listed_with_their_number() -> None:
    kube = Kube().start()
    kube.refused = tuple(Refusal(Ref("Pod", f"run-{i}"), POLICY, "be deleted") for i in range(6))
    kube.tick()
    assert read_condition(kube)[2].count(". Also: Pod run-") == 3
    assert read_condition(kube)[2].endswith(" and 2 more")


def test_refused_write_is_reported_with_and_after_a_deletion() -> None:
    kube = Kube().start()
    kube.refused = (Refusal(ENGINES, POLICY, "be scaled to 2"),)
    del kube.objects[SERVICE]
    kube.do(kube.decide())
    status, reason, message = read_condition(kube)
    assert (status, reason) == ("False", "Drifted")
    assert (
        "Service run-trainer was deleted; it is being repaired. Also: Deployment run-inference cannot be scaled"
        in message
    )
    kube.tick()
    assert read_condition(kube)[:2] == ("False", "AdmissionRefused")
    assert "Service" not in read_condition(kube)[2]


def test_repaired_condition_reports_no_current_problem() -> None:
    kube = Kube().start()
    kube.refused = (Refusal(ENGINES, POLICY, "be scaled to 2"),)
    del kube.objects[SERVICE]
    kube.do(kube.decide())
    kube.refused = ()
    kube.tick()
    assert read_condition(kube) == ("True", "Repaired", "Service run-trainer was deleted; it is repaired")


def test_suspension_reports_its_refused_write() -> None:
    kube = Kube().start()
    kube.edit(suspend=True)
    kube.do(kube.decide())
    kube.refused = (Refusal(TRAINER, POLICY, "be scaled to 0"),)
    kube.do(kube.decide())
    assert kube.status["phase"] == "Suspending"
    assert f"; StatefulSet run-trainer cannot be scaled to 0: {POLICY}; {RETRIED}" in kube.status["message"]


def test_refused_creation_is_reported_by_the_waiting_condition() -> None:
    kube = Kube().start()
    for ref in [ref for ref in kube.objects if ref == ENGINES or (ref.kind == "Pod" and "inference" in ref.name)]:
        del kube.objects[ref]
    kube.do(kube.decide())
    kube.now += 10
    kube.refused = (Refusal(ENGINES, POLICY, MADE),)
    kube.events = events_of(kube.refused, "ns")
    kube.do(kube.decide())
    assert POLICY in kube.condition("Scheduled")["message"]
    assert kube.condition("ChildrenIntact") == {}


def test_refused_creation_of_spot_engines_is_reported() -> None:
    kube, spot = Kube().start(), Ref("Deployment", "run-inference-spot")
    kube.refused = (Refusal(spot, POLICY, MADE),)
    kube.events = events_of(kube.refused, "ns")
    kube.tick()
    assert read_condition(kube)[:2] == ("False", "AdmissionRefused")
    assert read_condition(kube)[2].startswith(f"Deployment run-inference-spot cannot be created: {POLICY}; {RETRIED}")
    kube.refused, kube.events = (), []
    kube.tick()
    assert read_condition(kube)[:2] == ("True", "Repaired")


@pytest.mark.parametrize(
    ("status", "text", "told"),
    [
        (403, RIGHT, True),
        (422, POLICY, True),
        (400, "spec is invalid", True),
        (409, "the object has been modified", False),
    ],
)
def test_refused_status_is_an_event_except_conflicts(status: int, text: str, told: bool) -> None:
    event = request_refused(
        ApiError(status, "Reason", text, "patch /apis/rlrun.io/v1alpha1/namespaces/ns/rlruns/a/status")
    )
    assert (event is not None) == told
    if event is not None:
        assert (event.type, event.reason) == ("Warning", "RequestRefused")
        assert event.message.startswith(
            f"the operator cannot patch /apis/rlrun.io/v1alpha1/namespaces/ns/rlruns/a/status: {text}; "
        )
