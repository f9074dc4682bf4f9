"""End of a run (deadline, cleanup, time to live), more steps after completion, and manual restarts."""

from __future__ import annotations

import pytest

from rlrun_operator.names import RESTART_ANNOTATION, Ref
from rlrun_operator.state import Scale
from rlrun_operator.times import format_rfc3339
from tests.unit.operator.decide.kube import EPOCH, Kube
from tests.unit.operator.decide.test_shared import both, tick

STATEFULSET, DEPLOYMENT = Ref("StatefulSet", "run-trainer"), Ref("Deployment", "run-inference")
POLICY = {"failurePolicy": {"maxRestarts": 0}}


def request_restart(kube: Kube, value: str) -> None:
    kube.run["metadata"]["annotations"] = {RESTART_ANNOTATION: value}


def complete_run(kube: Kube) -> Kube:
    kube.exit("orchestrator", 0)
    kube.tick()
    assert kube.status["phase"] == "Complete"
    return kube


def fail_run(kube: Kube) -> Kube:
    kube.exit("trainer", 1)
    kube.tick()
    assert kube.status["phase"] == "Failed"
    return kube


# ---- activeDeadlineSeconds


def test_deadline_saves_and_fails_the_run() -> None:
    kube = Kube({"activeDeadlineSeconds": 100}).start()
    wake = kube.decide().wake_in
    assert wake is not None
    assert wake <= 98
    kube.tick(97)
    assert kube.status["phase"] == "Running"
    kube.lingering = {"trainer", "orchestrator"}
    kube.now += 1
    kube.do(kube.decide())
    assert (kube.status["phase"], kube.status["reason"]) == ("Failed", "DeadlineExceeded")
    assert ("Warning", "DeadlineExceeded") in kube.told
    assert kube.pods("trainer"), "on record first"
    kube.tick()
    assert all("deletionTimestamp" in pod["metadata"] for pod in kube.pods("trainer") + kube.pods("orchestrator"))
    kube.report(4, attempt=1, checkpoint_step=4)
    kube.tick()
    assert kube.status["checkpoint"]["latestCompleteStep"] == 4, "what it saved on its way out is told"


def test_suspended_time_does_not_count_towards_deadline() -> None:
    kube = Kube({"activeDeadlineSeconds": 100}).start()
    kube.edit(suspend=True)
    kube.tick()
    kube.tick(10_000)
    assert (kube.status["phase"], kube.status["activeSeconds"]) == ("Suspended", 3)
    kube.edit(suspend=False)
    kube.tick()
    kube.tick(96)
    assert kube.status["phase"] == "Starting"
    kube.tick(1)
    assert kube.status["reason"] == "DeadlineExceeded"


def test_deadline_is_editable_and_reset_by_manual_restart() -> None:
    kube = Kube({"activeDeadlineSeconds": 100}).start()
    kube.edit(activeDeadlineSeconds=200)
    kube.tick(150)
    assert kube.status["phase"] == "Running"
    kube.tick(50)
    assert kube.status["phase"] == "Failed"
    request_restart(kube, format_rfc3339(kube.now))
    kube.tick()
    kube.tick(150)
    assert (kube.status["phase"], kube.status["attempt"]) == ("Starting", 2)


# ---- cleanupPolicy and ttlSecondsAfterFinished


@pytest.mark.parametrize(("policy", "engines", "orchestrators"), [("GPU", 0, 1), ("All", 0, 0), ("None", 1, 1)])
def test_cleanup_on_complete_follows_its_policy(policy: str, engines: int, orchestrators: int) -> None:
    kube = complete_run(Kube({"cleanupPolicy": {"onComplete": policy}}).start())
    assert (len(kube.pods("inference")), len(kube.pods("orchestrator"))) == (engines, orchestrators)
    assert (STATEFULSET in kube.objects) == (policy == "None")


def test_completion_deletes_pods_without_waiting_for_an_event() -> None:
    kube = Kube({"cleanupPolicy": {"onComplete": "All"}}).start()
    kube.exit("orchestrator", 0)
    while (decision := kube.decide()).status["phase"] != "Complete":
        kube.do(decision)
        kube.controllers()
    kube.do(decision)
    assert decision.wake_in == 0.0
    assert [ref.name for ref in (gone.ref for gone in kube.decide().delete)] == ["run-orchestrator-1"]


@pytest.mark.parametrize(("policy", "trainers"), [("GPU", 0), ("All", 0), ("None", 1)])
def test_cleanup_on_failure_follows_its_policy(policy: str, trainers: int) -> None:
    kube = fail_run(Kube(POLICY | {"cleanupPolicy": {"onFailure": policy}}).start())
    assert (len(kube.pods("trainer")), len(kube.pods("inference"))) == (trainers, trainers)
    kube.tick(1000)
    assert len(kube.pods("trainer")) == trainers
    kube.edit(cleanupPolicy={"onFailure": "All"})
    kube.tick()
    assert not any(ref.kind == "Pod" for ref in kube.objects)


def test_deadline_deletes_pods_despite_cleanup_none() -> None:
    kube = Kube({"activeDeadlineSeconds": 10, "cleanupPolicy": {"onFailure": "None"}}).start()
    kube.tick(20)
    assert (kube.status["phase"], kube.pods("trainer")) == ("Failed", [])


@pytest.mark.parametrize("policy", ["GPU", "None"])
def test_ttl_deletes_children_but_not_run_and_volume(policy: str) -> None:
    spec = {"ttlSecondsAfterFinished": 60, "cleanupPolicy": {"onComplete": policy}}
    kube = complete_run(Kube(spec).start())
    assert kube.pods("orchestrator")
    wake = kube.decide().wake_in
    assert wake is not None
    assert 0 < wake <= 60
    kube.tick(61)
    kinds = {ref.kind for ref in kube.objects}
    assert not kinds & {"Pod", "StatefulSet", "Deployment"}
    assert "PersistentVolumeClaim" in kinds
    assert kube.status["phase"] == "Complete"


# ---- more steps


def test_more_steps_start_another_attempt_after_the_first() -> None:
    kube = Kube({"maxSteps": 10}).start()
    kube.edit(maxSteps=20)
    kube.tick()
    assert (kube.status["phase"], kube.status["attempt"], kube.status["steps"]) == ("Running", 1, "3/20")
    assert kube.condition("ConfigurationValid")["reason"] == "ChangePending"
    kube.report(10, checkpoint_step=10)
    kube.exit("orchestrator", 0)
    kube.do(kube.decide())
    assert "maxSteps has grown from 10 to 20" in kube.condition("Restarting")["message"]
    kube.tick()
    status = kube.status
    assert (status["phase"], status["attempt"], status["restarts"], status["maxSteps"]) == ("Starting", 2, 0, 20)
    kube.report(20, resumed=10)
    complete_run(kube)
    assert kube.status["steps"] == "20/20"


@pytest.mark.parametrize("stop_after", [0, 1, 2, 9, 10, 11])
def test_complete_run_continues_with_more_steps(stop_after: int) -> None:
    kube = complete_run(Kube({"maxSteps": 10}).start(10))
    kube.edit(maxSteps=20)
    for _ in range(4):
        kube.do(kube.decide(), stop_after=stop_after)
        kube.new_operator()
        kube.controllers()
    kube.tick()
    assert (kube.status["phase"], kube.status["attempt"], kube.status.get("completionTime")) == ("Starting", 2, None)
    assert kube.rendered_again == []


def test_manually_scaled_trainer_is_reset_despite_pending_steps() -> None:
    kube = Kube({"maxSteps": 10, "trainer": {"replicas": 2}}).start()
    kube.edit(maxSteps=20)
    kube.tick()
    kube.objects[STATEFULSET]["spec"]["replicas"] = 3
    assert kube.decide().scale == (Scale(STATEFULSET, kube.uid(STATEFULSET), 2),)


def test_run_completes_when_data_ends_before_max_steps() -> None:
    kube = Kube({"maxSteps": 10}).start(3)
    kube.report(4, total_steps=4)
    complete_run(kube)
    kube.tick(100)
    assert kube.status["phase"] == "Complete"


def test_complete_run_with_more_steps_can_be_suspended() -> None:
    kube = complete_run(Kube({"maxSteps": 10}).start(10))
    kube.edit(maxSteps=20, suspend=True)
    kube.tick()
    assert kube.status["phase"] == "Suspending", "a trainer that is not in the cache may be on its way into it"
    kube.tick(4)
    assert (kube.status["phase"], kube.status["attempt"]) == ("Suspended", 1)
    kube.edit(suspend=False)
    kube.tick()
    assert (kube.status["phase"], kube.status["attempt"]) == ("Starting", 2)


# ---- manual restart


def test_manual_restart_happens_once_and_is_uncounted() -> None:
    kube = Kube().start()
    request_restart(kube, format_rfc3339(EPOCH))
    kube.tick()
    status = kube.status
    assert (status["attempt"], status["restarts"], status["restartsCountedTowardsMax"]) == (2, 1, 0)
    assert kube.told.count(("Normal", "RestartRequested")) == 1
    kube.tick(100)
    assert kube.status["attempt"] == 2
    request_restart(kube, format_rfc3339(EPOCH + 200))
    kube.tick()
    assert kube.status["attempt"] == 3


@pytest.mark.parametrize("stop_after", [0, 1, 2, 3])
def test_manual_restart_survives_operator_crash(stop_after: int) -> None:
    kube = Kube().start()
    request_restart(kube, format_rfc3339(EPOCH))
    for _ in range(4):
        kube.do(kube.decide(), stop_after=stop_after)
        kube.new_operator()
        kube.controllers()
    kube.tick()
    assert (kube.status["attempt"], kube.status["restarts"]) == (2, 1)


def test_restart_annotation_at_creation_is_ignored() -> None:
    kube = Kube()
    request_restart(kube, format_rfc3339(EPOCH))
    kube.start()
    assert (kube.status["attempt"], kube.status["restarts"]) == (1, 0)
    assert ("Normal", "RestartRequested") not in kube.told


def test_manual_restart_ends_the_backoff() -> None:
    kube = Kube({"failurePolicy": {"backoff": {"initialSeconds": 300}}}).start()
    for _ in range(2):
        kube.exit("trainer", 1)
        kube.tick()
    assert kube.status["nextRetryTime"]
    request_restart(kube, format_rfc3339(EPOCH))
    kube.tick()
    assert (kube.status["attempt"], kube.status["restarts"], kube.status["phase"]) == (3, 2, "Starting")


def test_restarted_failed_run_has_a_fresh_restart_budget() -> None:
    kube = Kube({"failurePolicy": {"maxRestarts": 1}}).start()
    kube.exit("trainer", 1)
    kube.tick()
    assert kube.status["restartsCountedTowardsMax"] == 1
    fail_run(kube)
    kube.tick(10)
    request_restart(kube, format_rfc3339(EPOCH))
    kube.tick()
    kube.tick(4)
    status = kube.status
    assert (status["phase"], status["attempt"], status["restartsCountedTowardsMax"]) == ("Starting", 3, 0)
    assert (kube.condition("Failed")["status"], status.get("completionTime")) == ("False", None)
    kube.exit("trainer", 1)
    kube.tick()
    assert kube.status["attempt"] == 4, "restarts are allowed again"
    fail_run(kube)
    kube.tick(10)
    assert kube.status["phase"] == "Failed", "the same annotation asks once"


def test_failed_suspended_run_restarts_when_it_resumes() -> None:
    kube = Kube({"failurePolicy": {"maxRestarts": 1}}).start()
    kube.exit("trainer", 1)
    kube.tick()
    fail_run(kube)
    kube.edit(suspend=True)
    kube.tick(10)
    assert kube.status["phase"] == "Failed"
    request_restart(kube, format_rfc3339(EPOCH))
    kube.tick()
    assert (kube.status["phase"], kube.status["restartRequestedAt"]) == ("Suspending", format_rfc3339(EPOCH))
    kube.tick(4)
    assert (kube.status["phase"], kube.status["restartsCountedTowardsMax"]) == ("Suspended", 0)
    kube.edit(suspend=False)
    kube.tick(4)
    kube.tick(100)
    assert (kube.status["phase"], kube.status["attempt"]) == ("Starting", 3), "the annotation asked once"


def test_complete_run_is_not_restarted() -> None:
    kube = complete_run(Kube().start())
    request_restart(kube, format_rfc3339(EPOCH))
    kube.tick()
    assert kube.status["phase"] == "Complete"


def test_invalid_restart_time_is_reported_once() -> None:
    kube = Kube().start()
    request_restart(kube, "now")
    kube.tick()
    kube.tick()
    assert (kube.status["attempt"], kube.status["restarts"]) == (1, 0)
    assert kube.told.count(("Warning", "RestartRequestInvalid")) == 1
    assert any("(now) is not a time; write the current time" in message for message in kube.messages)


def test_manual_restart_of_guest_keeps_its_host() -> None:
    host, guest = both()
    request_restart(guest, format_rfc3339(EPOCH))
    tick(host, guest)
    assert (guest.status["attempt"], host.status["attempt"]) == (2, 1)
