"""Run with a role that has not started yet: effect of edits, and failure at the startup deadline."""

from __future__ import annotations

from typing import Any

import pytest

from rlrun_operator.names import RESTART_ANNOTATION, Ref
from rlrun_operator.times import format_rfc3339
from tests.unit.operator.decide.kube import Kube
from tests.unit.operator.decide.test_waiting import NOT_FOUND, make_event, pass_patience, set_waiting

WRONG, RIGHT = "registry.example.com/trainer:typo", "registry.example.com/trainer:1"
DEADLINE = 1800
SECRET_MISSING = 'secret "s3-credentials" not found'


def make_run_with_image(role: str = "trainer", image: str = WRONG, **more: Any) -> Kube:
    return Kube({role: {"image": image}, **more})


def fail_image_pull(kube: Kube, role: str = "trainer") -> Kube:
    set_waiting(kube, role, "ImagePullBackOff", f'Back-off pulling image "{WRONG}": {NOT_FOUND}')
    pass_patience(kube)
    assert kube.condition("InferenceAvailable" if role == "inference" else "PodsReady")["reason"] == "ImagePullFailed"
    return kube


def pass_startup_deadline(kube: Kube) -> None:
    """Pass the whole startup deadline without progress."""
    for _ in range(DEADLINE // 60 + 2):
        kube.tick(60)


@pytest.mark.parametrize("role", ["trainer", "inference", "orchestrator"])
def test_missing_image_fails_the_run_at_first_deadline(role: str) -> None:
    kube = fail_image_pull(make_run_with_image(role), role)
    pass_startup_deadline(kube)
    status = kube.status
    assert (status["phase"], status["reason"]) == ("Failed", "ImagePullFailed")
    assert (status["attempt"], status["restarts"], status["restartsCountedTowardsMax"]) == (1, 0, 0)
    assert status["lastFailure"]["reason"] == "ImagePullFailed"
    assert (status["lastFailure"]["role"], status["lastFailure"]["counted"]) == (role, False)
    assert f"{role}.image" in status["message"], "the fix"
    assert "progress.startupDeadlineSeconds: 1800" in status["message"]
    assert kube.pods("trainer") + kube.pods("inference") == [], "no GPU is held"
    assert ("Warning", "ImagePullFailed") in kube.told


def test_failed_start_is_retried_after_an_image_edit() -> None:
    kube = fail_image_pull(make_run_with_image())
    pass_startup_deadline(kube)
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


def test_failed_start_is_retried_after_a_restart_request() -> None:
    kube = fail_image_pull(make_run_with_image())
    pass_startup_deadline(kube)
    kube.make_ready = True
    kube.run["metadata"]["annotations"] = {RESTART_ANNOTATION: format_rfc3339(kube.now)}
    kube.tick(5)
    kube.tick(5)
    assert (kube.status["phase"], kube.status["attempt"]) == ("Starting", 2)


def test_edit_before_all_roles_started_takes_effect_immediately() -> None:
    kube = fail_image_pull(make_run_with_image("inference"), "inference")
    assert kube.status["unstarted"] == ["trainer", "inference", "orchestrator"]
    kube.make_ready = True
    kube.edit(inference={"image": RIGHT})
    kube.tick()
    kube.tick(5)
    status = kube.status
    assert (status["attempt"], status["restarts"], status["restartsCountedTowardsMax"]) == (2, 0, 0)
    assert kube.pod("inference")["spec"]["containers"][0]["image"] == RIGHT
    assert "failures" not in status or status["failures"] == []


def test_role_without_start_keeps_the_run_editable() -> None:
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


def test_edit_after_all_roles_started_waits_for_next_attempt() -> None:
    kube = Kube().start()
    assert "unstarted" not in kube.status
    kube.edit(trainer={"image": RIGHT})
    kube.tick()
    assert (kube.status["attempt"], kube.condition("ConfigurationValid")["reason"]) == (1, "ChangePending")


def test_restart_keeps_the_list_of_started_roles() -> None:
    kube = Kube().start()
    kube.exit("trainer", 1)
    kube.make_ready = False
    kube.tick()
    kube.tick(5)
    assert (kube.status["attempt"], "unstarted" in kube.status) == (2, False)


def test_unavailable_known_image_is_retried() -> None:
    """A temporary registry outage must not fail a run that has trained."""
    kube = Kube().start()
    kube.exit("trainer", 1)
    kube.make_ready = False
    kube.tick()
    kube.tick(5)
    set_waiting(kube, "trainer", "ImagePullBackOff", "registry unavailable")
    pass_startup_deadline(kube)
    assert kube.status["phase"] != "Failed"
    assert kube.status["restartsCountedTowardsMax"] == 2


def test_edited_image_of_suspended_run_fails_at_first_deadline() -> None:
    kube = Kube().start()
    kube.edit(suspend=True)
    kube.tick()
    kube.tick(5)
    kube.make_ready = False
    kube.edit(suspend=False, trainer={"image": WRONG})
    kube.tick()
    assert kube.status["unstarted"] == ["trainer", "inference", "orchestrator"]
    set_waiting(kube, "trainer", "ErrImagePull", NOT_FOUND)
    pass_startup_deadline(kube)
    assert (kube.status["phase"], kube.status["reason"]) == ("Failed", "ImagePullFailed")


@pytest.mark.parametrize(
    ("reason", "message", "says"),
    [
        ("CreateContainerConfigError", SECRET_MISSING, "ContainerConfigInvalid"),
        ("CreateContainerError", 'exec: "rlrun-pod": not found', "ContainerFailing"),
    ],
)
def test_invalid_container_fails_the_run_at_first_deadline(reason: str, message: str, says: str) -> None:
    kube = Kube()
    set_waiting(kube, "inference", reason, message)
    pass_patience(kube)
    pass_startup_deadline(kube)
    assert (kube.status["phase"], kube.status["reason"], kube.status["attempt"]) == ("Failed", says, 1)


def test_missing_command_does_not_count_as_a_start() -> None:
    kube = Kube()
    set_waiting(kube, "inference", "CrashLoopBackOff", "back-off")
    for pod in kube.pods("inference"):
        end = {"terminated": {"exitCode": 128, "reason": "StartError", "message": "exec: not found"}}
        pod["status"]["containerStatuses"][0] |= {"restartCount": 4, "lastState": end}
    pass_patience(kube)
    assert "inference" in kube.status["unstarted"]
    pass_startup_deadline(kube)
    assert (kube.status["phase"], kube.status["reason"]) == ("Failed", "ContainerFailing")


def test_user_rule_may_restart_after_failed_start() -> None:
    rule = {"name": "flaky", "action": "RestartUncounted", "onReasons": ["ImagePullFailed"]}
    kube = fail_image_pull(make_run_with_image(failurePolicy={"rules": [rule]}))
    pass_startup_deadline(kube)
    assert (kube.status["phase"] != "Failed", kube.status["restarts"]) == (True, 1)


def test_report_action_does_not_fail_the_run() -> None:
    kube = fail_image_pull(make_run_with_image(progress={"action": "Report"}))
    pass_startup_deadline(kube)
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
def test_missing_referenced_object_releases_gpus_at_the_deadline(text: str, what: str, fix: str) -> None:
    kube = Kube()
    kube._reconcile = refuse_trainers(kube)  # type: ignore[method-assign]
    kube.settle()
    made = f"create Pod run-trainer-0 in StatefulSet run-trainer failed error: {text}"
    kube.events = [make_event("StatefulSet", "run-trainer", "FailedCreate", made, format_rfc3339(kube.now))]
    pass_patience(kube)
    found = kube.condition("Scheduled")
    assert (found["status"], found["reason"]) == ("False", "ReferenceNotFound"), kube.status
    assert what in found["message"]
    assert fix in found["message"]
    pass_startup_deadline(kube)
    assert (kube.status["phase"], kube.status["reason"]) == ("Failed", "ReferenceNotFound")
    assert kube.pods("inference") == [], "no GPU is held"


def refuse_trainers(kube: Kube) -> Any:
    """Make the StatefulSet controller report refused pods."""
    real = kube._reconcile

    def reconcile(ref: Ref, owner: Any) -> Any:
        return {"replicas": 0} if ref.kind == "StatefulSet" else real(ref, owner)

    return reconcile


@pytest.mark.parametrize("made", ["StatefulSet", "Deployment"])
def test_workloads_from_before_an_edit_are_not_mixed(made: str) -> None:
    """The operator is killed between two workloads of an attempt, and the spec is edited before its restart."""
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
