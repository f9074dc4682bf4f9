"""Repair of services, policies, roles and ConfigMap that a user deletes or edits during an attempt."""

from __future__ import annotations

from itertools import pairwise

import pytest

from rlrun_operator.names import Ref
from rlrun_operator.state import Refusal
from tests.unit.operator.decide.kube import Kube

PARTS = [
    Ref("Service", "run-trainer"),
    Ref("Service", "run-inference"),
    Ref("ConfigMap", "run-rlrun"),
    Ref("ServiceAccount", "run-rlrun"),
    Ref("Role", "run-rlrun"),
    Ref("RoleBinding", "run-rlrun"),
    Ref("NetworkPolicy", "run-rlrun"),
    Ref("NetworkPolicy", "run-egress"),
    Ref("PodDisruptionBudget", "run-inference"),
]
ENGINES = {"inference": {"replicas": 2}}


def read_children_intact(kube: Kube) -> tuple[str, str, str]:
    condition = kube.condition("ChildrenIntact")
    return condition["status"], condition["reason"], condition["message"]


@pytest.mark.parametrize("part", PARTS, ids=str)
def test_deleted_part_is_reported_and_recreated_without_restart(part: Ref) -> None:
    kube = Kube(ENGINES).start()
    assert kube.condition("ChildrenIntact") == {}
    del kube.objects[part]
    kube.do(kube.decide())
    assert part in kube.objects
    assert read_children_intact(kube)[:2] == ("False", "Drifted")
    kube.tick()
    assert read_children_intact(kube) == ("True", "Repaired", f"{part.kind} {part.name} was deleted; it is repaired")
    assert (kube.status["attempt"], kube.status["phase"]) == (1, "Running")
    assert ("Warning", "Drifted") in kube.told


@pytest.mark.parametrize("part", PARTS, ids=str)
def test_edited_part_is_reported_and_repaired(part: Ref) -> None:
    kube = Kube(ENGINES).start()
    kube.edited.add(part)
    kube.settle()
    assert kube.edited == set()
    assert read_children_intact(kube)[1] == "Repaired"
    assert f"{part.kind} {part.name} was edited (" in read_children_intact(kube)[2]


def test_missing_part_is_created_without_overwriting() -> None:
    """The part may exist already if the response to a repair and its event were lost."""
    kube = Kube(ENGINES).start()
    part = Ref("Role", "run-rlrun")
    del kube.objects[part]
    (repair,) = kube.decide().repair
    assert (repair.expect_absent, repair.replaces, repair.known) == (True, None, None)


def test_repair_overwrites_only_the_observed_edit() -> None:
    kube = Kube(ENGINES).start()
    part = Ref("Role", "run-rlrun")
    kube.edited.add(part)
    kube.objects[part]["metadata"]["resourceVersion"] = "77"
    (repair,) = kube.decide().repair
    assert (repair.expect_absent, repair.replaces, repair.known) == (False, "77", None)


def test_refused_update_is_reported() -> None:
    """An edit of `inference` changes the budget within the attempt."""
    kube, words = Kube(ENGINES).start(), 'admission webhook "guard" denied the request'
    kube.edit(inference={"replicas": 3})
    kube.refused = (Refusal(Ref("PodDisruptionBudget", "run-inference"), words),)
    found = next(c for c in kube.decide().status["conditions"] if c["type"] == "ChildrenIntact")
    assert (found["status"], found["reason"]) == ("False", "Drifted")
    assert found["message"] == (
        "PodDisruptionBudget run-inference is not yet as the run needs it now; it is being repaired, and refused: "
        f"{words}; change the policy or webhook that refuses it; the operator retries"
    )
    kube.refused = ()
    kube.settle()
    assert kube.condition("ChildrenIntact") == {}, "it was never on record"


def test_unrelated_event_about_a_part_is_not_a_refusal() -> None:
    kube = Kube(ENGINES).start()
    kube.edit(inference={"replicas": 3})
    target = {"kind": "PodDisruptionBudget", "name": "run-inference"}
    kube.events = [{"type": "Warning", "reason": "NoPods", "message": "no matching pods", "involvedObject": target}]
    assert "no matching pods" not in str(kube.decide().status)


def test_repeated_repairs_are_five_seconds_apart() -> None:
    kube = Kube().start()
    made = []
    for _ in range(12):
        if kube.objects.pop(Ref("Role", "run-rlrun"), None) is not None:
            made.append(kube.now)
        kube.tick()
    assert [b - a for a, b in pairwise(made[1:])] == [5.0, 5.0]


def test_next_attempt_clears_the_repair_condition() -> None:
    kube = Kube().start()
    del kube.objects[Ref("Role", "run-rlrun")]
    kube.tick()
    kube.delete(kube.ref("trainer"))
    for _ in range(20):
        kube.tick()
    assert kube.status["attempt"] == 2
    assert kube.condition("ChildrenIntact") == {}


def test_part_with_pending_edit_waits_for_the_next_attempt() -> None:
    kube = Kube().start()
    kube.edit(maxSteps=70)
    kube.settle()
    for part in (Ref("ConfigMap", "run-rlrun"), Ref("NetworkPolicy", "run-egress"), Ref("Role", "run-rlrun")):
        del kube.objects[part]
    kube.tick()
    assert Ref("Role", "run-rlrun") in kube.objects
    kube.tick()
    assert Ref("ConfigMap", "run-rlrun") not in kube.objects
    assert read_children_intact(kube)[0] == "False"
    assert "ConfigMap run-rlrun was deleted; the next attempt recreates it" in read_children_intact(kube)[2]


def test_foreign_object_in_place_of_part_is_kept() -> None:
    kube = Kube().start()
    kube.taken = "Role run-rlrun"
    del kube.objects[Ref("Role", "run-rlrun")]
    kube.settle()
    assert Ref("Role", "run-rlrun") not in kube.objects
    assert kube.condition("Progressing")["reason"] == "NameTaken"


def test_outdated_lost_config_ends_the_attempt() -> None:
    kube = Kube().start()
    kube.edit(maxSteps=70)
    kube.settle()
    kube.make_ready = False
    kube.delete(kube.ref("inference"))
    kube.settle()
    assert kube.status["attempt"] == 1
    del kube.objects[Ref("ConfigMap", "run-rlrun")]
    kube.settle()
    failure = kube.status["lastFailure"]
    assert (failure["reason"], failure["role"], failure["counted"]) == ("Drifted", "inference", False)
