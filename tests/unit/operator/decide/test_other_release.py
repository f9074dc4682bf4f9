"""An operator of another release takes over: no attempt is made of two releases, and none reads the other's file."""

from __future__ import annotations

import dataclasses

import pytest

from rlrun_operator.decide.repairs import REPAIR_SECONDS
from rlrun_operator.names import CONFIG_ANNOTATION, Ref
from rlrun_operator.render.render_context import RunContext
from tests.unit.operator.decide.kube import Kube

CONFIG = Ref("ConfigMap", "run-rlrun")
OTHER = {"trainer": "reg/trainer:2", "inference": "reg/inference:2", "orchestrator": "reg/trainer:2"}


def other_images(kube: Kube) -> None:
    kube.settings = dataclasses.replace(kube.settings, images=OTHER)
    kube.new_operator()


def other_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next release's configuration file has a field more."""
    text = RunContext.config_text.func
    monkeypatch.setattr(RunContext, "config_text", property(lambda ctx: text(ctx).replace("{", '{"new": 1,', 1)))


def without_orchestrator() -> Kube:
    """The attempt is on record, and a quota has kept its orchestrator out."""
    kube = Kube()
    kube.make_ready = False
    kube.settle()
    kube.objects.pop(Ref("Pod", "run-orchestrator-1"))
    kube.run["status"] = {**kube.status, "launchedAttempt": 0}
    kube.new_operator()
    return kube


def images(kube: Kube) -> set[str]:
    """Of the workloads, and of the group's pods: this Deployment controller replaces none."""
    pods = [kube.objects[ref]["spec"] for ref in kube.objects if ref.kind == "Pod" and "inference" not in ref.name]
    made = [
        o["spec"]["template"]["spec"] for ref, o in kube.objects.items() if ref.kind in ("StatefulSet", "Deployment")
    ]
    return {spec["containers"][0]["image"] for spec in (*pods, *made)}


def test_a_pod_that_was_kept_out_comes_into_the_attempt_that_waits_for_it() -> None:
    kube = without_orchestrator()
    kube.settle()
    assert kube.status["attempt"] == 1
    assert Ref("Pod", "run-orchestrator-1") in kube.objects


def test_another_release_makes_the_whole_attempt_again_of_which_a_pod_was_kept_out() -> None:
    kube = without_orchestrator()
    before = images(kube)
    other_images(kube)
    for _ in range(20):
        kube.tick()
    assert images(kube).isdisjoint(before)
    assert images(kube) == set(OTHER.values())
    assert (kube.status["attempt"], kube.status["restartsCountedTowardsMax"]) == (2, 0)


def test_a_whole_attempt_is_left_as_it_is() -> None:
    kube = Kube().start()
    before = images(kube)
    other_images(kube)
    for _ in range(5):
        kube.tick()
    assert (kube.status["attempt"], images(kube)) == (1, before)


def test_a_lost_file_is_not_made_again_in_another_form(monkeypatch: pytest.MonkeyPatch) -> None:
    kube = Kube().start()
    other_file(monkeypatch)
    kube.new_operator()
    kube.tick()
    assert kube.condition("ChildrenIntact") == {}, "a file of another form is no damage"
    del kube.objects[CONFIG]
    kube.tick()
    assert CONFIG not in kube.objects
    assert (
        "ConfigMap run-rlrun was deleted; the next attempt recreates it" in kube.condition("ChildrenIntact")["message"]
    )
    kube.make_ready = False
    kube.delete(kube.ref("inference"))
    kube.settle()
    failure = kube.status["lastFailure"]
    assert (failure["reason"], failure["role"], failure["counted"]) == ("Drifted", "inference", False)
    assert "another release of the operator" in failure["message"]


@pytest.mark.parametrize("known", [True, False], ids=["marked", "of a release before marks"])
def test_the_same_file_is_made_again_by_another_process(known: bool) -> None:
    kube = Kube().start()
    if not known:
        (pod,) = (o for o in kube.objects.values() if o["metadata"]["name"] == "run-orchestrator-1")
        del pod["metadata"]["annotations"][CONFIG_ANNOTATION]
    kube.edit(inference={"replicas": 3})  # takes effect at once, and is no other file
    kube.new_operator()
    kube.tick()
    del kube.objects[CONFIG]
    kube.tick(REPAIR_SECONDS)
    assert CONFIG in kube.objects


def other_release(kube: Kube) -> None:
    """An operator of another release takes over: of its images, the engines' is another one."""
    kube.settings = dataclasses.replace(
        kube.settings, images={**kube.settings.images, "inference": "reg/inference:2", "trainer": "reg/trainer:2"}
    )
    kube.new_operator()


def test_after_an_upgrade_trainer_and_engines_are_renewed_together_by_the_next_attempt_and_not_before() -> None:
    kube = Kube().start()
    other_release(kube)
    before = len(kube.writes)
    for _ in range(5):
        kube.hang(60, 3)
    assert {write for write in kube.writes[before:] if write != "status"} == set(), "what runs is not touched"
    kube.exit("trainer", 1)
    kube.tick(1)
    kube.tick(5)
    assert kube.status["attempt"] == 2
    images = {
        ref.kind: found["spec"]["template"]["spec"]["containers"][0]["image"]
        for ref, found in kube.objects.items()
        if ref.kind in ("StatefulSet", "Deployment")
    }
    assert images == {"StatefulSet": "reg/trainer:2", "Deployment": "reg/inference:2"}
    assert kube.writes.count("apply Deployment run-inference") == 1
    kube.exit("trainer", 1)
    kube.tick(1)
    kube.tick(30)
    kube.tick(5)
    assert kube.status["attempt"] == 3
    assert kube.writes.count("apply Deployment run-inference") == 1, "engines that are rendered no otherwise stay"


def test_engines_are_renewed_where_the_format_of_their_file_is_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ConfigMap is one for all attempts: an engine of before that starts again would not read what it holds now."""
    kube = Kube().start()
    monkeypatch.setattr("rlrun_operator.render.workloads.config_format", lambda: "another")
    kube.exit("trainer", 1)
    kube.tick(1)
    kube.tick(5)
    assert kube.status["attempt"] == 2
    assert kube.writes.count("apply Deployment run-inference") == 1


def test_an_upgrade_in_the_middle_of_a_beginning_makes_one_attempt() -> None:
    kube = Kube().start()
    kube.exit("trainer", 1)
    other = Kube()
    other_release(other)
    for _ in range(12):
        kube.do(kube.decide(), stop_after=3)
        kube.controllers()
        kube.settings = other.settings
        kube.now += 1
    kube.tick(5)
    kube.tick(5)
    assert kube.status["attempt"] == 2
    deployment = kube.objects[Ref("Deployment", "run-inference")]
    assert deployment["spec"]["template"]["spec"]["containers"][0]["image"] == "reg/inference:2"
