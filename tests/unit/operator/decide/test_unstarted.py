"""A run one of whose roles has not started: what an edit does, and how it ends without one."""

from __future__ import annotations

from typing import Any

import pytest

from rlrun_operator.names import RESTART_ANNOTATION, Ref
from rlrun_operator.times import rfc3339
from tests.unit.operator.decide.kube import Kube
from tests.unit.operator.decide.test_waiting import NOT_FOUND, event, patience_over, waiting

WRONG, RIGHT = "registry.example.com/trainer:typo", "registry.example.com/trainer:1"
DEADLINE = 1800
SECRET_MISSING = 'secret "s3-credentials" not found'


def with_image(role: str = "trainer", image: str = WRONG, **more: Any) -> Kube:
    return Kube({role: {"image": image}, **more})


def cannot_pull(kube: Kube, role: str = "trainer") -> Kube:
    waiting(kube, role, "ImagePullBackOff", f'Back-off pulling image "{WRONG}": {NOT_FOUND}')
    patience_over(kube)
    assert kube.condition("InferenceAvailable" if role == "inference" else "PodsReady")["reason"] == "ImagePullFailed"
    return kube


def to_the_deadline(kube: Kube) -> None:
    """All time passes that a start has, without any progress."""
    for _ in range(DEADLINE // 60 + 2):
        kube.tick(60)


@pytest.mark.parametrize("role", ["trainer", "inference", "orchestrator"])
def test_image_that_does_not_exist_ends_the_run_at_the_first_deadline(role: str) -> None:
    kube = cannot_pull(with_image(role), role)
    to_the_deadline(kube)
    status = kube.status
    assert (status["phase"], status["reason"]) == ("Failed", "ImagePullFailed")
    assert (status["attempt"], status["restarts"], status["restartsCountedTowardsMax"]) == (1, 0, 0)
    assert status["lastFailure"]["reason"] == "ImagePullFailed"
    assert (status["lastFailure"]["role"], status["lastFailure"]["counted"]) == (role, False)
    assert f"{role}.image" in status["message"], "the fix"
    assert "progress.startupDeadlineSeconds: 1800" in status["message"]
    assert kube.pods("trainer") + kube.pods("inference") == [], "no GPU is held"
    assert ("Warning", "ImagePullFailed") in kube.told


def test_failed_start_begins_again_when_the_image_is_edited() -> None:
    kube = cannot_pull(with_image())
    to_the_deadline(kube)
    kube.make_ready = True
    kube.edit(trainer={"image": RIGHT})
    kube.tick(5)
    kube.tick(5)
    assert kube.status["phase"] == "Starting", kube.status
    assert kube.pod("trainer")["spec"]["containers"][0]["image"] == RIGHT
    assert kube.condition("Failed")["status"] == "False"
    kube.report(1)
    kube.tick()
    assert kube.status["phase"] == "Running"


def test_failed_start_begins_again_when_a_restart_is_requested() -> None:
    kube = cannot_pull(with_image())
    to_the_deadline(kube)
    kube.make_ready = True
    kube.run["metadata"]["annotations"] = {RESTART_ANNOTATION: rfc3339(kube.now)}
    kube.tick(5)
    kube.tick(5)
    assert (kube.status["phase"], kube.status["attempt"]) == ("Starting", 2)


def test_edit_before_every_role_has_started_takes_effect_at_once() -> None:
    kube = cannot_pull(with_image("inference"), "inference")
    assert kube.status["unstarted"] == ["trainer", "inference", "orchestrator"]
    kube.make_ready = True
    kube.edit(inference={"image": RIGHT})
    kube.tick()
    kube.tick(5)
    status = kube.status
    assert (status["attempt"], status["restarts"], status["restartsCountedTowardsMax"]) == (2, 0, 0)
    assert kube.pod("inference")["spec"]["containers"][0]["image"] == RIGHT
    assert "failures" not in status or status["failures"] == []


def test_role_that_has_not_started_keeps_the_run_editable() -> None:
    kube = Kube({"inference": {"image": WRONG}})
    kube.place = lambda pod: None if pod["metadata"]["labels"]["rlrun.io/role"] == "inference" else "node-1"
    kube.settle()
    kube.tick()
    assert kube.status["unstarted"] == ["inference"]
    kube.place = lambda pod: "node-1"
    kube.edit(inference={"image": RIGHT})
    kube.tick()
    kube.tick(5)
    assert kube.status["attempt"] == 2
    assert "unstarted" not in kube.status, "all have started now"


def test_edit_waits_for_the_next_attempt_once_every_role_has_started() -> None:
    kube = Kube().start()
    assert "unstarted" not in kube.status
    kube.edit(trainer={"image": RIGHT})
    kube.tick()
    assert (kube.status["attempt"], kube.condition("ConfigurationValid")["reason"]) == (1, "ChangePending")


def test_restart_keeps_the_roles_that_have_started() -> None:
    kube = Kube().start()
    kube.exit("trainer", 1)
    kube.make_ready = False
    kube.tick()
    kube.tick(5)
    assert (kube.status["attempt"], "unstarted" in kube.status) == (2, False)


def test_image_that_was_there_before_is_restarted_as_before() -> None:
    """A registry that is away for a while does not end a run that has trained."""
    kube = Kube().start()
    kube.exit("trainer", 1)
    kube.make_ready = False
    kube.tick()
    kube.tick(5)
    waiting(kube, "trainer", "ImagePullBackOff", "registry unavailable")
    to_the_deadline(kube)
    assert kube.status["phase"] != "Failed"
    assert kube.status["restartsCountedTowardsMax"] == 2


def test_edited_image_of_a_suspended_run_ends_at_the_first_deadline_too() -> None:
    kube = Kube().start()
    kube.edit(suspend=True)
    kube.tick()
    kube.tick(5)
    kube.make_ready = False
    kube.edit(suspend=False, trainer={"image": WRONG})
    kube.tick()
    assert kube.status["unstarted"] == ["trainer", "inference", "orchestrator"]
    waiting(kube, "trainer", "ErrImagePull", NOT_FOUND)
    to_the_deadline(kube)
    assert (kube.status["phase"], kube.status["reason"]) == ("Failed", "ImagePullFailed")


@pytest.mark.parametrize(
    ("reason", "message", "says"),
    [
        ("CreateContainerConfigError", SECRET_MISSING, "ContainerConfigInvalid"),
        ("CreateContainerError", 'exec: "rlrun-pod": not found', "ContainerFailing"),
    ],
)
def test_container_that_cannot_be_made_ends_the_run_at_the_first_deadline(reason: str, message: str, says: str) -> None:
    kube = Kube()
    waiting(kube, "inference", reason, message)
    patience_over(kube)
    to_the_deadline(kube)
    assert (kube.status["phase"], kube.status["reason"], kube.status["attempt"]) == ("Failed", says, 1)


def test_command_that_is_not_in_the_image_is_no_start() -> None:
    kube = Kube()
    waiting(kube, "inference", "CrashLoopBackOff", "back-off")
    for pod in kube.pods("inference"):
        end = {"terminated": {"exitCode": 128, "reason": "StartError", "message": "exec: not found"}}
        pod["status"]["containerStatuses"][0] |= {"restartCount": 4, "lastState": end}
    patience_over(kube)
    assert "inference" in kube.status["unstarted"]
    to_the_deadline(kube)
    assert (kube.status["phase"], kube.status["reason"]) == ("Failed", "ContainerFailing")


def test_rule_of_the_user_may_restart_instead() -> None:
    rule = {"name": "flaky", "action": "RestartUncounted", "onReasons": ["ImagePullFailed"]}
    kube = cannot_pull(with_image(failurePolicy={"rules": [rule]}))
    to_the_deadline(kube)
    assert (kube.status["phase"] != "Failed", kube.status["restarts"]) == (True, 1)


def test_report_alone_ends_nothing() -> None:
    kube = cannot_pull(with_image(progress={"action": "Report"}))
    to_the_deadline(kube)
    assert (kube.status["phase"], kube.status["attempt"]) == ("Starting", 1)


REFERENCES = [
    (
        'pods "run-trainer-0" is forbidden: no PriorityClass with name nope was found',
        "PriorityClass nope, which does not exist",
        "trainer.priorityClassName",
    ),
    (
        'pods "run-trainer-0" is forbidden: pod rejected: RuntimeClass "kata" not found',
        "RuntimeClass kata, which does not exist",
        "trainer.runtimeClassName",
    ),
    (
        'pods "run-trainer-0" is forbidden: error looking up service account team-a/bot: serviceaccount "bot" not found',
        "ServiceAccount bot, which does not exist",
        "trainer.podTemplate",
    ),
]


@pytest.mark.parametrize(("text", "what", "fix"), REFERENCES)
def test_pods_that_name_a_missing_object_do_not_hold_gpus_for_ever(text: str, what: str, fix: str) -> None:
    kube = Kube()
    kube._reconcile = refuse_trainers(kube)  # type: ignore[method-assign]
    kube.settle()
    made = f"create Pod run-trainer-0 in StatefulSet run-trainer failed error: {text}"
    kube.events = [event("StatefulSet", "run-trainer", "FailedCreate", made, rfc3339(kube.now))]
    patience_over(kube)
    found = kube.condition("Scheduled")
    assert (found["status"], found["reason"]) == ("False", "ReferenceNotFound"), kube.status
    assert what in found["message"]
    assert fix in found["message"]
    to_the_deadline(kube)
    assert (kube.status["phase"], kube.status["reason"]) == ("Failed", "ReferenceNotFound")
    assert kube.pods("inference") == [], "no GPU is held"


def refuse_trainers(kube: Kube) -> Any:
    """A StatefulSet's controller whose pods are refused."""
    real = kube._reconcile

    def reconcile(ref: Ref, owner: Any) -> Any:
        return {"replicas": 0} if ref.kind == "StatefulSet" else real(ref, owner)

    return reconcile


@pytest.mark.parametrize("made", ["StatefulSet", "Deployment"])
def test_workloads_of_before_an_edit_begin_no_attempt_with_those_of_after_it(made: str) -> None:
    """The operator is killed between two workloads of an attempt, and the specification is edited before another one works."""
    kube = Kube()
    decision = kube.decide()
    kinds = [apply.manifest["kind"] for apply in decision.apply]
    kube.do(decision, stop_after=len(decision.create) + kinds.index(made) + 1)
    assert kube.status == {}, "nothing is on record"
    kube.edit(maxSteps=70)
    for _ in range(10):
        kube.tick()
    found = [
        o["metadata"].get("annotations", {})
        for ref, o in kube.objects.items()
        if ref.kind in ("StatefulSet", "Deployment")
    ]
    assert (kube.status["attempt"], len({each["rlrun.io/spec-hash"] for each in found})) == (2, 1)
