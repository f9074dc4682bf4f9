"""Services, policies, rights and ConfigMap that somebody deletes or edits while an attempt runs."""

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


def told(kube: Kube) -> tuple[str, str, str]:
    condition = kube.condition("ChildrenIntact")
    return condition["status"], condition["reason"], condition["message"]


@pytest.mark.parametrize("part", PARTS, ids=str)
def test_a_deleted_part_is_told_and_made_again_and_the_attempt_goes_on(part: Ref) -> None:
    kube = Kube(ENGINES).start()
    assert kube.condition("ChildrenIntact") == {}
    del kube.objects[part]
    kube.do(kube.decide())
    assert part in kube.objects
    assert told(kube)[:2] == ("False", "Drifted")
    kube.tick()
    assert told(kube) == ("True", "Repaired", f"{part.kind} {part.name} was deleted; it is repaired")
    assert (kube.status["attempt"], kube.status["phase"]) == (1, "Running")
    assert ("Warning", "Drifted") in kube.told


@pytest.mark.parametrize("part", PARTS, ids=str)
def test_an_edited_part_is_told_and_applied_again(part: Ref) -> None:
    kube = Kube(ENGINES).start()
    kube.edited.add(part)
    kube.settle()
    assert kube.edited == set()
    assert told(kube)[1] == "Repaired"
    assert f"{part.kind} {part.name} was edited (" in told(kube)[2]


def test_a_part_that_the_cache_lacks_is_made_and_nothing_that_exists_is_written_over() -> None:
    """The answer to a repair was lost, and so was its event: the part is whole."""
    kube = Kube(ENGINES).start()
    part = Ref("Role", "run-rlrun")
    del kube.objects[part]
    (repair,) = kube.decide().repair
    assert (repair.expect_absent, repair.replaces, repair.known) == (True, None, None)


def test_an_edited_part_is_applied_over_that_edit_alone() -> None:
    kube = Kube(ENGINES).start()
    part = Ref("Role", "run-rlrun")
    kube.edited.add(part)
    kube.objects[part]["metadata"]["resourceVersion"] = "77"
    (repair,) = kube.decide().repair
    assert (repair.expect_absent, repair.replaces, repair.known) == (False, "77", None)


def test_an_update_that_is_refused_is_told() -> None:
    """An edit of `inference` moves the budget within the attempt."""
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


def test_an_event_of_another_controller_about_a_part_is_no_refusal_of_its_repair() -> None:
    kube = Kube(ENGINES).start()
    kube.edit(inference={"replicas": 3})
    target = {"kind": "PodDisruptionBudget", "name": "run-inference"}
    kube.events = [{"type": "Warning", "reason": "NoPods", "message": "no matching pods", "involvedObject": target}]
    assert "no matching pods" not in str(kube.decide().status)


def test_what_is_deleted_again_and_again_is_made_again_every_five_seconds() -> None:
    kube = Kube().start()
    made = []
    for _ in range(12):
        if kube.objects.pop(Ref("Role", "run-rlrun"), None) is not None:
            made.append(kube.now)
        kube.tick()
    assert [b - a for a, b in pairwise(made[1:])] == [5.0, 5.0]


def test_the_next_attempt_forgets_what_was_put_right() -> None:
    kube = Kube().start()
    del kube.objects[Ref("Role", "run-rlrun")]
    kube.tick()
    kube.delete(kube.ref("trainer"))
    for _ in range(20):
        kube.tick()
    assert kube.status["attempt"] == 2
    assert kube.condition("ChildrenIntact") == {}


def test_what_depends_on_an_edited_specification_waits_for_its_attempt() -> None:
    kube = Kube().start()
    kube.edit(maxSteps=70)
    kube.settle()
    for part in (Ref("ConfigMap", "run-rlrun"), Ref("NetworkPolicy", "run-egress"), Ref("Role", "run-rlrun")):
        del kube.objects[part]
    kube.tick()
    assert Ref("Role", "run-rlrun") in kube.objects
    kube.tick()
    assert Ref("ConfigMap", "run-rlrun") not in kube.objects
    assert told(kube)[0] == "False"
    assert "ConfigMap run-rlrun was deleted; the next attempt recreates it" in told(kube)[2]


def test_a_part_in_whose_place_is_something_else_is_left_to_its_owner() -> None:
    kube = Kube().start()
    kube.taken = "Role run-rlrun"
    del kube.objects[Ref("Role", "run-rlrun")]
    kube.settle()
    assert Ref("Role", "run-rlrun") not in kube.objects
    assert kube.condition("Progressing")["reason"] == "NameTaken"


def test_a_pod_that_waits_for_a_lost_configuration_of_before_an_edit_ends_the_attempt() -> None:
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
