"""Takeover by an operator of another release: each attempt has one release, and no role reads another release's file."""

from __future__ import annotations

import dataclasses
import json

import pytest

from rlrun_operator.decide.repairs import REPAIR_SECONDS
from rlrun_operator.names import CONFIG_ANNOTATION, Ref
from rlrun_operator.render.render_context import RunContext
from tests.unit.operator.decide.kube import Kube

CONFIG = Ref("ConfigMap", "run-rlrun")
OTHER = {"trainer": "reg/trainer:2", "inference": "reg/inference:2", "orchestrator": "reg/trainer:2"}


def change_images(kube: Kube) -> None:
    kube.settings = dataclasses.replace(kube.settings, images=OTHER)
    kube.new_operator()


def change_config_format(monkeypatch: pytest.MonkeyPatch) -> None:
    """Add a field to the next release's configuration file."""
    text = RunContext.config_text.func
    monkeypatch.setattr(RunContext, "config_text", property(lambda ctx: text(ctx).replace("{", '{"new": 1,', 1)))


ADDED = ("router", "return_routes", "replay_routes", "epochs_per_step")
"""Fields of the configuration file that the last release did not have."""
HASH_OF_BEFORE = "33615688a695a31d"
"""`specHash` of `SMALLEST` in the last release without `trainer.router`."""


def remove_added_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the operator write the configuration file of the last release."""
    text = RunContext.config_text.func

    def earlier(ctx: RunContext) -> str:
        document = json.loads(text(ctx))
        for section in document.values():
            for name in ADDED if isinstance(section, dict) else ():
                section.pop(name, None)
                section.get("model", {}).pop("class_", None)
        return json.dumps(document, indent=1) + "\n"

    monkeypatch.setattr(RunContext, "config_text", property(earlier))
    monkeypatch.setattr("rlrun_operator.render.workloads.config_format", lambda: "of before")


def start_without_orchestrator() -> Kube:
    """Attempt that is recorded but whose orchestrator is refused by a quota."""
    kube = Kube()
    kube.make_ready = False
    kube.settle()
    kube.objects.pop(Ref("Pod", "run-orchestrator-1"))
    kube.run["status"] = {**kube.status, "launchedAttempt": 0}
    kube.new_operator()
    return kube


def list_images(kube: Kube) -> set[str]:
    """Images of workloads and of the group's pods; this Deployment controller replaces no pod."""
    pods = [kube.objects[ref]["spec"] for ref in kube.objects if ref.kind == "Pod" and "inference" not in ref.name]
    made = [
        o["spec"]["template"]["spec"] for ref, o in kube.objects.items() if ref.kind in ("StatefulSet", "Deployment")
    ]
    return {spec["containers"][0]["image"] for spec in (*pods, *made)}


def test_refused_pod_joins_the_waiting_attempt() -> None:
    kube = start_without_orchestrator()
    kube.settle()
    assert kube.status["attempt"] == 1
    assert Ref("Pod", "run-orchestrator-1") in kube.objects


def test_incomplete_attempt_is_restarted_by_another_release() -> None:
    kube = start_without_orchestrator()
    before = list_images(kube)
    change_images(kube)
    for _ in range(20):
        kube.tick()
    assert list_images(kube).isdisjoint(before)
    assert list_images(kube) == set(OTHER.values())
    assert (kube.status["attempt"], kube.status["restartsCountedTowardsMax"]) == (2, 0)


def test_complete_attempt_is_kept_by_another_release() -> None:
    kube = Kube().start()
    before = list_images(kube)
    change_images(kube)
    for _ in range(5):
        kube.tick()
    assert (kube.status["attempt"], list_images(kube)) == (1, before)


@pytest.mark.parametrize("spot", [False, True])
def test_fields_for_mixtures_do_not_edit_a_run_of_the_last_release(monkeypatch: pytest.MonkeyPatch, spot: bool) -> None:
    with monkeypatch.context() as earlier:
        remove_added_fields(earlier)
        engines = {"replicas": 2, "spot": {"share": 0.5, "nodeSelector": {"capacity": "spot"}}}
        kube = Kube({"inference": engines} if spot else None).start()
        config_hash = kube.status["configHash"]
    assert '"router"' not in kube.objects[CONFIG]["data"]["run.json"]
    assert spot or kube.status["specHash"] == HASH_OF_BEFORE
    kube.new_operator()
    before = len(kube.writes)
    for _ in range(5):
        kube.tick(60)
    assert {write for write in kube.writes[before:] if "status" not in write} == set()
    assert (kube.status["attempt"], kube.status["phase"]) == (1, "Running")
    assert kube.condition("ConfigurationValid")["reason"] == "Valid"
    assert kube.condition("ChildrenIntact") == {}
    kube.exit("trainer", 1)
    kube.tick(1)
    kube.tick(30)
    kube.tick(5)
    assert kube.status["attempt"] == 2
    assert kube.status["configHash"] == config_hash
    assert '"router"' in kube.objects[CONFIG]["data"]["run.json"]
    assert kube.writes.count("apply Deployment run-inference") == 1, (
        "an engine of the last release refuses the new file"
    )


def test_deleted_config_of_another_release_is_not_recreated(monkeypatch: pytest.MonkeyPatch) -> None:
    kube = Kube().start()
    change_config_format(monkeypatch)
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
def test_unchanged_config_is_recreated_by_another_process(known: bool) -> None:
    kube = Kube().start()
    if not known:
        (pod,) = (o for o in kube.objects.values() if o["metadata"]["name"] == "run-orchestrator-1")
        del pod["metadata"]["annotations"][CONFIG_ANNOTATION]
    kube.edit(inference={"replicas": 3})  # applies immediately and does not change the file
    kube.new_operator()
    kube.tick()
    del kube.objects[CONFIG]
    kube.tick(REPAIR_SECONDS)
    assert CONFIG in kube.objects


def change_release(kube: Kube) -> None:
    """Change the release of the operator, which has another engine image."""
    kube.settings = dataclasses.replace(
        kube.settings, images={**kube.settings.images, "inference": "reg/inference:2", "trainer": "reg/trainer:2"}
    )
    kube.new_operator()


def test_next_attempt_after_upgrade_renews_trainer_and_engines() -> None:
    kube = Kube().start()
    change_release(kube)
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


def test_engines_are_renewed_if_config_format_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """All attempts share one ConfigMap, and a restarted old engine could not read the new format."""
    kube = Kube().start()
    monkeypatch.setattr("rlrun_operator.render.workloads.config_format", lambda: "another")
    kube.exit("trainer", 1)
    kube.tick(1)
    kube.tick(5)
    assert kube.status["attempt"] == 2
    assert kube.writes.count("apply Deployment run-inference") == 1


def test_upgrade_during_a_start_makes_one_attempt() -> None:
    kube = Kube().start()
    kube.exit("trainer", 1)
    other = Kube()
    change_release(other)
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
