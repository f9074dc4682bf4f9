"""Failures that end an attempt: their reason, whether they count, and the start of the next attempt."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from rlrun.api.lifecycle import BackoffSpec
from rlrun_operator.failures.failure_policy import restart_backoff
from rlrun_operator.names import Ref
from rlrun_operator.state import Delete, Scale
from tests.unit.operator.decide.kube import Kube, copy_documents

SPEC = {"trainer": {"replicas": 2}, "inference": {"replicas": 1}}
TRAINER = Ref("StatefulSet", "run-trainer")


def evict(kube: Kube) -> None:
    kube.pod("trainer")["status"] |= {
        "phase": "Failed",
        "reason": "Evicted",
        "message": "The node was low on resource: memory.",
    }


def replace(kube: Kube) -> None:
    """Delete and recreate the pod while no operator runs."""
    kube.now += 2
    del kube.objects[kube.ref("trainer")]
    kube.controllers()
    kube.new_operator()


def replace_at_once(kube: Kube) -> None:
    """Delete and recreate the pod between two looks of the operator."""
    del kube.objects[kube.ref("trainer")]
    kube.controllers()


def die_and_be_replaced(kube: Kube) -> None:
    """Fail the pod; the operator sees it, but the pod is removed before it acts."""
    kube.exit("trainer", 1)
    kube.look()
    replace_at_once(kube)


def vanish(kube: Kube) -> None:
    kube.schedule = False
    del kube.objects[kube.ref("trainer")]


def unknown(kube: Kube) -> None:
    kube.exit("trainer", 137, reason="ContainerStatusUnknown")


def deleted_orchestrator_without_trace(kube: Kube) -> None:
    del kube.objects[kube.ref("orchestrator")]


def die_and_be_removed(kube: Kube) -> None:
    kube.exit("orchestrator", 1)
    kube.look()
    del kube.objects[kube.ref("orchestrator")]


@pytest.mark.parametrize(
    ("happens", "role", "reason", "counted"),
    [
        (lambda k: k.exit("trainer", 1, 1), "trainer", "ExitCode", True),
        (lambda k: k.exit("trainer", 137), "trainer", "Killed", True),
        (lambda k: k.exit("trainer", 137, reason="OOMKilled"), "trainer", "OOMKilled", True),
        (lambda k: k.exit("trainer", 10), "trainer", "StorageError", False),
        (lambda k: k.exit("trainer", 1, init=True), "trainer", "ExitCode", True),
        (lambda k: k.exit("orchestrator", 1), "orchestrator", "ExitCode", True),
        (unknown, "trainer", "NodeLost", False),
        (evict, "trainer", "PodEvicted", False),
        (die_and_be_removed, "orchestrator", "ExitCode", True),
        (replace, "trainer", "PodReplaced", False),
        (replace_at_once, "trainer", "PodDeleted", False),
        (die_and_be_replaced, "trainer", "ExitCode", True),
        (vanish, "trainer", "PodDeleted", False),
        (deleted_orchestrator_without_trace, "orchestrator", "PodDeleted", False),
        (lambda k: k.delete(k.ref("trainer", 1)), "trainer", "PodDeleted", False),
        (lambda k: k.delete(k.ref("orchestrator")), "orchestrator", "PodDeleted", False),
        (lambda k: k.delete(TRAINER), "trainer", "PodDeleted", False),
        (lambda k: k.disrupt("trainer"), "trainer", "PodEvicted", False),
        (lambda k: k.disrupt("trainer", reason="DeletionByTaintManager"), "trainer", "NodeLost", False),
    ],
)
def test_failure_restarts_all_roles(happens: Callable[[Kube], None], role: str, reason: str, counted: bool) -> None:
    kube = Kube(SPEC).start(step=7)
    happens(kube)
    kube.do(kube.decide())
    failure = kube.status["lastFailure"]
    assert (failure["role"], failure["reason"], failure["counted"], failure["step"]) == (role, reason, counted, 7)
    assert (kube.status["phase"], kube.status["attempt"]) == ("Restarting", 1)
    kube.schedule = True
    kube.tick()
    kube.tick(4)  # a StatefulSet's deleted pods may become visible late
    assert (kube.status["phase"], kube.status["attempt"], kube.attempts_of_trainers()) == ("Starting", 2, {"2"})
    assert (kube.status["restarts"], kube.status["restartsCountedTowardsMax"]) == (1, int(counted))
    assert [pod["metadata"]["name"] for pod in kube.pods("orchestrator")] == ["run-orchestrator-2"]
    told = {True: ("Warning", "AttemptFailed"), False: ("Warning", "Disrupted")}[counted]
    assert told in kube.told


def test_pod_replaced_within_its_ready_second_restarts_the_run() -> None:
    """Creation and readiness have whole seconds, so only the UID differs."""
    kube = Kube(SPEC)
    kube.settle()
    assert kube.condition("PodsReady")["status"] == "True"
    assert kube.pod("trainer")["metadata"]["creationTimestamp"] == kube.condition("PodsReady")["lastTransitionTime"]
    replace_at_once(kube)
    kube.settle()
    kube.tick()
    assert (kube.status["attempt"], kube.attempts_of_trainers()) == (2, {"2"})
    assert (kube.status["lastFailure"]["reason"], kube.status["restartsCountedTowardsMax"]) == ("PodDeleted", 0)


def test_unscheduled_pod_may_be_replaced() -> None:
    kube = Kube(SPEC)
    kube.schedule = False
    kube.settle()
    replace_at_once(kube)
    kube.schedule = True
    kube.tick()
    assert (kube.status["attempt"], kube.condition("PodsReady")["status"]) == (1, "True")


def test_cause_is_recorded_before_pods_are_deleted() -> None:
    kube = Kube(SPEC).start()
    kube.exit("trainer", 1, message="CUDA error: device-side assert")
    first = kube.decide()
    assert (first.scale, first.delete, first.apply, first.urgency, first.wake_in) == ((), (), (), "now", 0.0)
    assert "CUDA error" in first.status["lastFailure"]["message"]
    kube.do(first)
    second = kube.decide()
    assert second.scale == (Scale(TRAINER, kube.uid(TRAINER), 0),)
    assert [d.ref.name for d in second.delete] == ["run-orchestrator-1"]


def test_held_pod_gets_no_time_to_save() -> None:
    kube = Kube(SPEC).start()
    kube.lingering = {"trainer"}
    kube.exit("trainer", 1)
    kube.tick()
    kube.tick()
    shorter = [write for write in kube.writes if write.endswith(" within 1 s")]
    assert shorter == ["delete Pod run-trainer-0 within 1 s"], "once, and not the one that may be saving"


@pytest.mark.parametrize(("code", "phase"), [(0, "Complete"), (65, "Failed")])
def test_held_pod_of_finished_run_gets_no_grace_period(code: int, phase: str) -> None:
    kube = Kube(SPEC).start()
    kube.lingering = {"trainer"}
    kube.report(100)
    kube.exit("trainer", code)
    kube.exit("orchestrator", code)
    kube.tick(4)
    shorter = [write for write in kube.writes if write.endswith(" within 1 s")]
    assert shorter == ["delete Pod run-trainer-0 within 1 s"], "once, and not the one that may be saving"
    kube.lingering = set()
    kube.tick(3)
    assert kube.status["phase"] == phase
    assert not kube.pods("trainer")


def test_restart_keeps_the_engines() -> None:
    kube = Kube(SPEC).start()
    engine = kube.pod("inference")["metadata"]["uid"]
    kube.exit("trainer", 1)
    kube.tick()
    kube.tick()
    assert (kube.status["attempt"], kube.pod("inference")["metadata"]["uid"]) == (2, engine)
    assert kube.writes.count("apply Deployment run-inference") == 0


def test_next_attempt_waits_for_old_pods_and_their_controller() -> None:
    kube = Kube(SPEC).start()
    kube.exit("trainer", 1)
    kube.do(kube.decide())
    kube.do(kube.decide())
    del kube.objects[kube.ref("trainer")], kube.objects[kube.ref("trainer")]
    kube.objects.pop(Ref("Pod", "run-orchestrator-1"))
    waiting = kube.decide()  # the StatefulSet's controller has not seen the scale to 0 yet and may still create a pod
    assert (waiting.apply, waiting.status["phase"]) == ((), "Restarting")
    kube.controllers()
    assert [a.manifest["kind"] for a in kube.decide().apply][-2:] == ["StatefulSet", "Pod"]


@pytest.mark.parametrize("role", ["trainer", "orchestrator"])
def test_lingering_pod_delays_the_next_attempt(role: str) -> None:
    kube = Kube(SPEC).start()
    kube.lingering = {role}
    kube.exit("trainer", 1)
    kube.tick()
    kube.tick(1000)
    assert (kube.status["phase"], kube.status["attempt"], kube.applied) == (
        "Restarting",
        1,
        [("StatefulSet", 1), ("Pod", 1)],
    )
    assert kube.pod(role)["metadata"]["name"] in kube.status["message"]
    kube.lingering = set()
    kube.tick()
    kube.tick()
    assert (kube.status["phase"], kube.status["attempt"]) == ("Starting", 2)


@pytest.mark.parametrize("stop_after", range(14))
@pytest.mark.parametrize("at", range(4))
def test_operator_crash_during_restart_is_recovered(at: int, stop_after: int) -> None:
    kube = Kube(SPEC).start()
    kube.exit("trainer", 1, message="first cause")
    for _ in range(at):
        kube.do(kube.decide())
        kube.controllers()
    kube.do(kube.decide(), stop_after=stop_after)
    kube.tick()
    kube.start(step=9, resumed=2)
    assert (kube.status["attempt"], kube.status["restarts"], kube.status["restartsCountedTowardsMax"]) == (2, 1, 1)
    assert kube.status["lastFailure"]["message"] == "first cause"
    assert kube.applied == [("StatefulSet", 1), ("Pod", 1), ("StatefulSet", 2), ("Pod", 2)]


def test_fourth_failure_exceeds_three_restarts() -> None:
    kube = Kube(SPEC).start()
    waits = []
    for attempt in range(2, 5):
        kube.exit("trainer", 1, message="boom")
        kube.do(kube.decide())
        waits.append(kube.status.get("nextRetryTime"))
        kube.tick(30)
        kube.start()
        assert kube.status["attempt"] == attempt
    kube.exit("trainer", 1, message="boom")
    kube.tick()
    assert (kube.status["phase"], kube.condition("Failed")["reason"]) == ("Failed", "MaxRestartsExceeded")
    assert "boom" in kube.status["message"]
    assert "failurePolicy.maxRestarts (3)" in kube.status["message"]
    assert (kube.status["restartsCountedTowardsMax"], kube.pods("trainer")) == (3, [])
    assert [bool(wait) for wait in waits] == [False, True, True], "the first restart is at once"
    assert kube.condition("Stalled")["status"] == "True"


def test_backoff_delays_the_next_attempt() -> None:
    kube = Kube(SPEC | {"failurePolicy": {"backoff": {"initialSeconds": 20, "maxSeconds": 60}}}).start()
    for _ in range(2):
        kube.exit("trainer", 1)
        kube.tick(1)
        began = kube.now
        if kube.status["attempt"] == 1 and kube.status["restarts"] == 1:
            kube.start()
    kube.tick(15)
    assert (kube.status["phase"], kube.condition("Restarting")["reason"]) == ("Restarting", "BackOff")
    assert kube.decide().wake_in == pytest.approx(began - 15 + 15 + 20 - kube.now, abs=6)
    kube.tick(8)
    assert kube.status["phase"] == "Starting"
    assert "nextRetryTime" not in kube.status


@pytest.mark.parametrize(
    ("restart", "random", "seconds"),
    [(1, 0.5, 0), (2, 0.5, 10), (3, 0.5, 20), (4, 0.0, 32), (4, 1.0, 48), (20, 0.5, 300), (5000, 0.0, 240)],
)
def test_backoff_doubles_up_to_its_maximum(restart: int, random: float, seconds: float) -> None:
    assert restart_backoff(restart, BackoffSpec(), random) == pytest.approx(seconds)


def test_disruptions_are_never_counted() -> None:
    kube = Kube(SPEC | {"failurePolicy": {"maxRestarts": 0}}).start()
    for attempt in range(2, 8):
        kube.delete(kube.ref("trainer"))
        kube.tick()
        kube.start(step=attempt + 2)
        assert (kube.status["attempt"], kube.status["restartsCountedTowardsMax"]) == (attempt, 0)
    assert (kube.status["restarts"], len(kube.status["failures"])) == (6, 5)


@pytest.mark.parametrize(
    ("happens", "role", "reason"),
    [
        (
            lambda k: k.exit("orchestrator", 78, message="environments[0]: no such environment"),
            "orchestrator",
            "ConfigurationError",
        ),
        (lambda k: k.exit("trainer", 65, 1), "trainer", "DataError"),
        (lambda k: k.exit("trainer", 78, init=True), "trainer", "ConfigurationError"),
        (lambda k: k.exit("inference", 69), "inference", "PermanentError"),
    ],
)
def test_permanent_failure_fails_the_run_immediately(happens: Callable[[Kube], None], role: str, reason: str) -> None:
    kube = Kube(SPEC).start()
    happens(kube)
    kube.tick()
    assert (kube.status["phase"], kube.condition("Failed")["reason"]) == ("Failed", "PermanentFailure")
    assert (kube.status["lastFailure"]["role"], kube.status["lastFailure"]["reason"]) == (role, reason)
    assert (kube.pods("trainer"), kube.pods("inference")) == ([], [])
    assert ("Warning", "PermanentFailure") in kube.told


def test_crashed_engine_is_reported_without_a_restart() -> None:
    kube = Kube(SPEC).start()
    kube.exit("inference", 1, message="CUDA out of memory")
    kube.tick()
    kube.tick(3)
    condition = kube.condition("InferenceAvailable")
    assert (condition["status"], condition["reason"], kube.status["phase"]) == ("False", "ContainerFailing", "Running")
    assert "exit code 1" in condition["message"]
    assert "CUDA out of memory" in condition["message"]


def test_engine_exit_with_restart_rule_costs_one_restart() -> None:
    rule = {"name": "go-on", "action": "Restart", "onExitCodes": [65]}
    kube = Kube(SPEC | {"failurePolicy": {"maxRestarts": 3, "rules": [rule]}}).start()
    kube.exit("inference", 65)
    kube.now += 2
    for _ in range(40):
        kube.tick(10)
    assert (kube.status["attempt"], kube.status["restartsCountedTowardsMax"]) == (2, 1), (
        "its pod still tells of that end"
    )
    kube.exit("inference", 65)
    kube.now += 2
    for _ in range(40):
        kube.tick(10)
    assert (kube.status["attempt"], kube.status["restartsCountedTowardsMax"]) == (3, 2), "it has ended once more"


def test_unrecorded_attempt_that_completes_reports_its_base(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kube = Kube(SPEC).start(step=27)
    written = kube._write_status
    kube.exit("trainer", 137)
    with monkeypatch.context() as refusing:
        refusing.setattr(kube, "_write_status", lambda d: written(d) if d.status.get("attempt") == 1 else None)
        kube.tick()
    assert (kube.status["attempt"], kube.attempts_of_trainers()) == (1, {"2"})
    kube.report(100, attempt=2, resumed=20)
    kube.exit("orchestrator", 0)
    kube.tick()
    assert kube.status["attempt"] == 2
    assert kube.status["checkpoint"] == {"resumedFromStep": 20, "stepsLostTotal": 7}


def test_lost_checkpoint_is_reported_until_a_new_one() -> None:
    kube = Kube(SPEC).start(step=27)
    kube.report(61, checkpoint_step=60)
    kube.tick()
    kube.exit("trainer", 137)
    kube.tick()
    kube.tick(700)
    kube.report(0, resumed=None, checkpoint_step=None)
    kube.tick()
    for step in (1, 19):
        kube.report(step, checkpoint_step=None)
        kube.tick()
        condition = kube.condition("CheckpointHealthy")
        assert (condition["status"], condition["reason"]) == ("False", "CheckpointsLost")
        assert (
            "attempt 2 started from the model, although the checkpoint of step 60 was complete" in condition["message"]
        )
        assert "latestCompleteStep" not in kube.status["checkpoint"]
    assert kube.told.count(("Warning", "CheckpointsLost")) == 1
    kube.report(21, checkpoint_step=20)
    kube.tick()
    assert kube.condition("CheckpointHealthy")["reason"] == "CheckpointsComplete"


def test_lost_steps_are_counted_once_per_restart() -> None:
    kube = Kube(SPEC).start(step=27)
    for attempt, (reached, resumed, lost) in enumerate([(27, 20, 7), (44, 40, 11), (40, None, 51)], start=2):
        kube.report(reached)
        kube.tick()
        kube.exit("trainer", 137)
        kube.tick()
        kube.tick(700)
        assert (kube.status["attempt"], "resumedFromStep" in kube.status["checkpoint"]) == (attempt, False)
        kube.report(None)
        kube.tick()
        kube.report(resumed or 0, resumed=resumed)
        kube.tick()
        kube.tick()
        assert (kube.status["checkpoint"]["stepsLostTotal"], kube.status["checkpoint"]["resumedFromStep"]) == (
            lost,
            resumed or 0,
        )
    assert kube.told.count(("Normal", "ResumedFromCheckpoint")) == 2


def test_report_of_an_older_attempt_is_ignored() -> None:
    kube = Kube(SPEC).start(step=27)
    kube.exit("trainer", 137)
    kube.tick()
    kube.tick()
    kube.report(99, attempt=1)
    kube.tick()
    assert (kube.status["attempt"], kube.status["steps"], kube.status["phase"]) == (2, "27/100", "Starting")


def test_finished_run_is_complete_despite_late_trainer_failure() -> None:
    kube = Kube(SPEC).start()
    kube.exit("trainer", 1)
    kube.do(kube.decide())
    assert kube.status["phase"] == "Restarting"
    kube.exit("orchestrator", 0)
    kube.tick()
    kube.tick()
    assert (kube.status["phase"], kube.condition("Restarting")["status"]) == ("Complete", "False")


def test_trainer_that_ends_before_orchestrator_is_not_a_failure() -> None:
    kube = Kube(SPEC).start()
    kube.exit("trainer", 0)
    kube.tick()
    assert (kube.status["phase"], kube.condition("PodsReady")["status"]) == ("Running", "True")


def test_late_pod_of_an_older_attempt_is_deleted() -> None:
    kube = Kube(SPEC).start()
    zombie: Any = {
        **kube.pod("trainer"),
        "metadata": {**kube.pod("trainer")["metadata"], "name": "run-trainer-9", "uid": "z"},
    }
    zombie["metadata"]["labels"] = zombie["metadata"]["labels"] | {"rlrun.io/attempt": "0"}
    kube.objects[Ref("Pod", "run-trainer-9")] = zombie
    assert kube.decide().delete == (Delete(Ref("Pod", "run-trainer-9"), "z"),)


def test_manually_scaled_trainer_returns_to_its_size() -> None:
    kube = Kube(SPEC).start()
    kube.objects[TRAINER]["spec"]["replicas"] = 3
    assert kube.decide().scale == (Scale(TRAINER, kube.uid(TRAINER), 2),)


@pytest.mark.parametrize("role", ["trainer", "orchestrator"])
@pytest.mark.parametrize("other", [False, True], ids=["of this run", "of a deleted run"])
def test_copied_pod_with_labels_is_ignored(role: str, other: bool) -> None:
    """A user may copy a pod with its labels for debugging; its end must not affect the run."""
    kube = Kube(SPEC).start()
    copy = copy_documents(kube.pod(role))
    name = f"{copy['metadata']['name']}-debug"
    copy["metadata"] |= {"name": name, "uid": "uid-of-copy", "ownerReferences": []}
    if other:
        copy["metadata"]["annotations"]["rlrun.io/run-uid"] = "uid-of-deleted"
    copy["status"] |= {"phase": "Failed", "reason": "Evicted"}
    kube.objects[Ref("Pod", name)] = copy
    kube.settle()
    assert (kube.status["phase"], kube.status["restarts"]) == ("Running", 0)
    kube.exit("trainer", 1)
    for _ in range(40):
        kube.tick()
        kube.settle()
    assert kube.status["attempt"] == 2, "the next attempt does not wait for the copy"
    assert Ref("Pod", name) in kube.objects


def test_deleted_statefulset_delays_the_next_attempt() -> None:
    """Its controller may have created a pod a moment before."""
    kube = Kube().start()
    kube.delete(Ref("StatefulSet", "run-trainer"))
    while kube.condition("Restarting")["status"] != "True":
        kube.do(kube.decide())
    for pod in (*kube.pods("trainer"), *kube.pods("orchestrator")):
        kube.objects.pop(Ref("Pod", pod["metadata"]["name"]))
    decision = kube.decide()
    assert (decision.apply, decision.wake_in) == ((), 3.0)
    kube.now += 3
    assert kube.decide().apply
