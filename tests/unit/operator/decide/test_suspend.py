"""Suspend and resume: saved checkpoint, zero pods, next attempt, and changes of `suspend` at any moment."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from rlrun_operator.names import Ref
from rlrun_operator.state import Delete, Scale
from tests.unit.operator.decide.kube import Kube
from tests.unit.operator.decide.test_shared import both, make_guest, make_host, tick

SPEC = {"trainer": {"replicas": 2}, "inference": {"replicas": 2}}
STATEFULSET, DEPLOYMENT = Ref("StatefulSet", "run-trainer"), Ref("Deployment", "run-inference")
LINGERING = {"trainer", "orchestrator"}


def start_run(step: int = 7) -> Kube:
    kube = Kube(SPEC).start(step)
    kube.report(step, checkpoint_step=5)
    kube.tick()
    return kube


def has_no_pods(kube: Kube) -> bool:
    return not any(ref.kind == "Pod" for ref in kube.objects) and DEPLOYMENT not in kube.objects


def execute_without_status(kube: Kube) -> None:
    """Execute a decision without its status, like an operator that is killed before that write."""
    decision = kube.decide()
    requests = [*decision.create, *decision.apply, *decision.scale, *decision.delete]
    kube.do(decision, stop_after=len(requests))


def test_suspension_saves_before_engines_are_deleted() -> None:
    kube = start_run()
    kube.edit(suspend=True)
    kube.lingering = set(LINGERING)
    first = kube.decide()
    assert (first.scale, first.delete, first.status["phase"]) == ((), (), "Suspending"), (
        "on record before anything goes"
    )
    kube.do(first)
    second = kube.decide()
    assert second.scale == (Scale(STATEFULSET, kube.uid(STATEFULSET), 0),)
    assert [d.ref for d in second.delete] == [Ref("Pod", "run-orchestrator-1")]
    assert second.delete[0].grace_seconds is None, "the pod's own grace period: it saves"
    kube.tick()
    assert (kube.status["phase"], len(kube.pods("inference"))) == ("Suspending", 2), "engines stay while they save"
    assert "run-trainer-0" in kube.condition("Suspended")["message"]
    kube.report(7, checkpoint_step=7)  # the final checkpoint during suspension
    kube.lingering = {"inference"}
    kube.tick()
    assert (kube.status["phase"], DEPLOYMENT in kube.objects) == ("Suspending", False)
    assert kube.status["checkpoint"]["latestCompleteStep"] == 7
    kube.lingering = set()
    kube.tick()
    assert (kube.status["phase"], has_no_pods(kube)) == ("Suspended", True)
    assert "continues from the checkpoint of step 7, when" in kube.status["message"]
    assert Ref("PersistentVolumeClaim", "run-data") in kube.objects
    assert [t for t in kube.told if t[1].startswith("Suspend")] == [("Normal", "Suspending"), ("Normal", "Suspended")]
    assert kube.condition("Reconciling")["status"] == "False"


def test_resumed_run_has_uncounted_attempt_and_no_lost_steps() -> None:
    kube = start_run()
    kube.edit(suspend=True)
    kube.tick()
    kube.report(7, attempt=1, checkpoint_step=7)
    kube.tick(600)
    assert (kube.status["phase"], kube.status["activeSeconds"]) == ("Suspended", 4)
    kube.edit(suspend=False, seqLen=4096)
    kube.tick()
    status = kube.status
    assert (status["phase"], status["attempt"], status["restarts"]) == ("Starting", 2, 0)
    kube.report(8, resumed=7)
    kube.tick()
    assert (kube.status["phase"], kube.status["checkpoint"]["stepsLostTotal"]) == ("Running", 0)
    assert kube.condition("Suspended")["status"] == "False"
    assert kube.condition("ConfigurationValid")["reason"] == "Valid", "the attempt was made with the edit"
    assert len(kube.pods("inference")) == 2


def test_suspension_without_final_checkpoint_reports_lost_steps() -> None:
    kube = start_run()
    kube.edit(suspend=True)
    kube.do(kube.decide())
    kube.exit("trainer", 137)
    kube.tick()
    assert kube.status["phase"] == "Suspended"
    assert "checkpoint of step 5; 2 steps trained after it are trained again" in kube.status["message"]
    assert (kube.status["restartsCountedTowardsMax"], kube.status.get("lastFailure")) == (0, None)


def test_started_suspension_completes_before_resuming() -> None:
    kube = start_run()
    kube.lingering = set(LINGERING)
    kube.edit(suspend=True)
    kube.tick()
    kube.edit(suspend=False)
    kube.tick()
    assert (kube.status["phase"], kube.status["attempt"]) == ("Suspending", 1)
    kube.lingering = set()
    kube.tick()
    assert (kube.status["phase"], kube.status["attempt"]) == ("Starting", 2)
    assert ("Normal", "Suspended") in kube.told
    assert kube.attempts_of_trainers() == {"2"}


def a_backoff() -> Kube:
    kube = Kube(SPEC | {"failurePolicy": {"backoff": {"initialSeconds": 100, "maxSeconds": 100}}}).start()
    for _ in range(2):
        kube.exit("trainer", 1)
        kube.tick()
    assert kube.condition("Restarting")["reason"] == "BackOff"
    return kube


def pods_that_start() -> Kube:
    kube = Kube(SPEC)
    kube.schedule = False
    kube.settle()
    return kube


def half_made() -> Kube:
    kube = Kube(SPEC)
    execute_without_status(kube)
    assert "attempt" not in kube.status
    return kube


@pytest.mark.parametrize(
    ("made", "attempt"),
    [(Kube, 0), (pods_that_start, 1), (half_made, 1), (a_backoff, 2)],
    ids=lambda v: getattr(v, "__name__", ""),
)
def test_run_in_any_state_suspends_and_resumes(made: Callable[[], Kube], attempt: int) -> None:
    kube = made()
    kube.edit(suspend=True, **SPEC)
    kube.tick()
    assert (kube.status["phase"], kube.status["attempt"], has_no_pods(kube)) == ("Suspended", attempt, True)
    assert "nextRetryTime" not in kube.status
    kube.tick(1000)
    assert kube.status["phase"] == "Suspended"
    kube.schedule = True
    kube.edit(suspend=False)
    kube.tick()
    assert (kube.status["phase"], kube.status["attempt"]) == ("Starting", attempt + 1)
    assert len(kube.pods("trainer")) == 2


@pytest.mark.parametrize("stop_after", [0, 1, 2, 4, 7, 9, 10, 11, 12, 13])
def test_operator_crash_during_suspension_is_recovered(stop_after: int) -> None:
    kube = start_run()
    for suspend in (True, False):
        kube.edit(suspend=suspend)
        for _ in range(5):
            kube.do(kube.decide(), stop_after=stop_after)
            kube.new_operator()
            kube.controllers()
        kube.tick()
        assert kube.status["phase"] == ("Suspended" if suspend else "Starting")
        assert has_no_pods(kube) == suspend
    assert (kube.status["attempt"], kube.attempts_of_trainers()) == (2, {"2"})
    assert kube.rendered_again == []


def test_run_can_be_suspended_again_during_resumption() -> None:
    kube = start_run()
    kube.edit(suspend=True)
    kube.tick()
    kube.edit(suspend=False)
    execute_without_status(kube)
    kube.controllers()
    assert kube.attempts_of_trainers() == {"2"}
    assert kube.status["attempt"] == 1
    kube.edit(suspend=True)
    kube.tick()
    assert (kube.status["phase"], kube.status["attempt"], has_no_pods(kube)) == ("Suspended", 2, True)
    kube.edit(suspend=False)
    kube.tick()
    assert kube.status["attempt"] == 3


def test_pod_created_during_suspension_is_deleted() -> None:
    kube = start_run()
    kube.edit(suspend=True)
    kube.tick()
    kube.objects[STATEFULSET]["spec"]["replicas"] = 1  # manual scaling
    kube.objects[STATEFULSET]["metadata"]["generation"] += 1
    kube.controllers()
    assert kube.pods("trainer")
    kube.tick()
    assert (kube.status["phase"], has_no_pods(kube), kube.status["attempt"]) == ("Suspended", True, 1)


def test_invalid_suspended_run_resumes_only_after_correction() -> None:
    kube = start_run()
    kube.edit(suspend=True, trainer={"replicas": 0})
    kube.tick()
    assert kube.status["phase"] == "Suspended"
    kube.edit(suspend=False)
    kube.tick()
    assert (kube.status["phase"], kube.condition("ConfigurationValid")["status"]) == ("Suspended", "False")
    assert "stays suspended: its specification is invalid: spec.trainer.replicas" in kube.status["message"]
    kube.edit(**SPEC)
    kube.tick()
    assert (kube.status["phase"], kube.status["attempt"]) == ("Starting", 2)


def test_run_completing_during_suspension_is_complete() -> None:
    kube = start_run()
    kube.edit(suspend=True)
    kube.do(kube.decide())
    kube.exit("orchestrator", 0)
    kube.tick()
    assert (kube.status["phase"], kube.condition("Suspended")["reason"]) == ("Complete", "NotSuspended")
    assert not kube.pods("trainer")


def test_completing_run_is_not_suspended() -> None:
    kube = start_run()
    kube.exit("orchestrator", 0)
    kube.tick()
    kube.edit(suspend=True)
    kube.tick()
    assert kube.status["phase"] == "Complete"


def test_suspended_guest_releases_its_slot() -> None:
    host, guest = both()
    guest.edit(suspend=True)
    tick(host, guest)
    assert (guest.status["phase"], guest.pods("orchestrator"), host.status["phase"]) == ("Suspended", [], "Running")
    assert "guests" not in host.status
    other = make_guest(host, name="other")
    tick(host, guest, other)
    assert other.status["phase"] == "Starting"
    guest.edit(suspend=False)
    tick(host, guest, other)
    assert (guest.status["phase"], guest.condition("HostAvailable")["reason"]) == ("Suspended", "HostSlotsTaken")
    assert "stays suspended: trainer.sharedWith (host): all slots are taken" in guest.status["message"]
    other.edit(suspend=True)
    tick(host, guest, other)
    assert (guest.status["phase"], guest.status["attempt"], guest.status["restarts"]) == ("Starting", 2, 0)


def test_guests_of_a_suspended_host_wait_uncounted() -> None:
    host, guest = both()
    host.edit(suspend=True)
    tick(host, guest)
    tick(host, guest)
    assert (host.status["phase"], host.pods("trainer"), guest.pods("orchestrator")) == ("Suspended", [], [])
    assert (guest.status["phase"], guest.condition("HostAvailable")["reason"]) == ("Restarting", "HostSuspended")
    host.edit(suspend=False)
    tick(host, guest)
    host.report(3, resumed=2)
    tick(host, guest)
    tick(host, guest)
    assert (host.status["attempt"], guest.status["attempt"], guest.status["phase"]) == (2, 2, "Starting")
    assert guest.status["restartsCountedTowardsMax"] == 0


def test_host_with_only_guests_left_can_be_suspended() -> None:
    host, guest = both()
    host.exit("orchestrator", 0)
    tick(host, guest)
    assert host.status["reason"] == "GuestsJoined"
    host.edit(suspend=True)
    tick(host, guest)
    assert (host.status["phase"], host.pods("trainer"), host.pods("inference")) == ("Suspended", [], [])
    assert make_host().status == {}


def test_engines_are_deleted_by_uid() -> None:
    kube = start_run()
    kube.edit(suspend=True)
    kube.do(kube.decide())
    kube.do(kube.decide())
    kube.controllers()
    kube.controllers()
    uid = kube.objects[DEPLOYMENT]["metadata"]["uid"]
    assert kube.decide().delete == (Delete(DEPLOYMENT, uid),)


def test_suspending_run_does_not_fail_at_its_deadline() -> None:
    kube = Kube({"activeDeadlineSeconds": 100}).start()
    kube.now += 90
    kube.edit(suspend=True)
    kube.lingering = set(LINGERING)
    kube.tick()
    kube.now += 20
    kube.tick()
    assert kube.status["phase"] == "Suspending"
    kube.lingering = set()
    kube.tick()
    kube.tick(5)
    assert kube.status["phase"] == "Suspended"
