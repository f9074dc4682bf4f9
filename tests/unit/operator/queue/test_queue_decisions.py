"""Queued run: nothing is created before its admission is recorded, and preemption suspends instead of killing."""

from __future__ import annotations

from rlrun_operator.names import Ref
from rlrun_operator.state import Admission
from rlrun_operator.status import reasons
from rlrun_operator.status.wait_facts import QUEUE_LOOKS_SOON
from tests.unit.operator.decide.kube import Kube

SPEC = {"trainer": {"replicas": 2}, "inference": {"replicas": 2}}
ROOM = Admission(True, reasons.ROOM_FOUND, "there is room for all pods of the run")
NEED = "trainer needs 2 nodes with 8 free nvidia.com/gpu each; 1 qualifies (node-7: 3 free)"
WAITS = Admission(False, reasons.WAITING_FOR_RESOURCES, NEED, position=2, waiting=5)
SOON = Admission(False, reasons.WAITING_FOR_TURN, QUEUE_LOOKS_SOON)
LOSES = Admission(False, reasons.PREEMPTED, "it releases its resources to run team-b/x", stops=True)


def start_queued_run() -> Kube:
    kube = Kube(SPEC)
    kube.admission = WAITS
    kube.tick()
    return kube


def start_admitted_run(step: int = 7) -> Kube:
    kube = Kube(SPEC)
    kube.admission = ROOM
    kube.start(step)
    kube.report(step, checkpoint_step=5)
    kube.tick()
    return kube


def list_workloads(kube: Kube) -> list[Ref]:
    return [ref for ref in kube.objects if ref.kind in ("StatefulSet", "Deployment", "Pod")]


def test_waiting_run_has_no_pods_and_reports_missing_room() -> None:
    kube = start_queued_run()
    assert list_workloads(kube) == []
    assert (kube.status["phase"], kube.status["reason"]) == ("Queued", "WaitingForResources")
    assert kube.status["message"] == f"position 2 of 5: {NEED}"
    assert (kube.status["queue"]["position"], kube.status["queue"]["waiting"]) == (2, 5)


def test_queue_and_start_times_are_in_events() -> None:
    kube = start_queued_run()
    kube.tick(30.0)
    kube.admission = ROOM
    kube.tick()
    assert [reason for _, reason in kube.told][:3] == ["Queued", "Admitted", "AttemptStarted"]


def test_first_event_reports_missing_room_after_the_first_plan() -> None:
    kube = Kube(SPEC)
    kube.admission = SOON
    kube.tick()
    assert (kube.status["phase"], kube.told) == ("Queued", [])
    kube.admission = WAITS
    (event,) = kube.decide().events
    assert (event.reason, event.message) == ("Queued", f"position 2 of 5: {NEED}")
    kube.tick()
    kube.tick(60.0)
    assert kube.told == [("Normal", "Queued")]


def test_queue_time_is_kept() -> None:
    kube = start_queued_run()
    since = kube.status["queue"]["since"]
    kube.tick(60.0)
    assert kube.status["queue"]["since"] == since
    kube.admission = ROOM
    kube.tick(60.0)
    assert kube.status["queue"] == {"since": since}, "kept for the case that it is preempted, without a position"


def test_admission_is_recorded_before_anything_is_created() -> None:
    kube = start_queued_run()
    kube.admission = ROOM
    first = kube.decide()
    assert (first.create, first.apply, first.wake_in, first.urgency) == ((), (), 0.0, "now")
    kube.do(first)
    assert kube.condition("Admitted")["status"] == "True"
    second = kube.decide()
    assert {apply.manifest["kind"] for apply in second.apply} >= {"StatefulSet", "Deployment", "Pod"}


def test_decision_without_admission_reports_no_queue() -> None:
    kube = Kube(SPEC).start(3)
    assert "queue" not in kube.status
    assert kube.condition("Admitted") == {}
    assert kube.status["phase"] == "Running"


def test_disabled_queue_leaves_no_status() -> None:
    kube = start_queued_run()
    kube.admission = None
    kube.start(2)
    assert "queue" not in kube.status
    assert kube.condition("Admitted") == {}
    assert kube.status["phase"] == "Running"


def test_run_from_before_the_queue_continues() -> None:
    kube = Kube(SPEC).start(3)
    kube.admission = ROOM
    kube.tick()
    assert (kube.status["phase"], kube.condition("Admitted")["status"], kube.status["attempt"]) == (
        "Running",
        "True",
        1,
    )


def test_restart_keeps_its_admission() -> None:
    kube = start_admitted_run()
    kube.exit("trainer", 1)
    kube.tick()
    assert kube.condition("Admitted")["status"] == "True"
    kube.tick(60.0)
    assert kube.status["attempt"] == 2


def test_preempted_run_saves_and_continues_from_there() -> None:
    kube = start_admitted_run()
    since = kube.status["queue"]["since"]
    kube.admission = LOSES
    kube.lingering = {"trainer", "orchestrator"}
    first = kube.decide()
    assert (first.scale, first.delete, first.status["phase"]) == ((), (), "Suspending"), "on record first"
    kube.tick()
    assert (kube.status["phase"], kube.condition("Admitted")["reason"]) == ("Suspending", "Preempted")
    assert kube.pods("trainer"), "the pods have their grace period: they save"
    kube.admission = Admission(False, reasons.NOT_QUEUED, "the run asks for no room now")
    kube.report(7, checkpoint_step=7)
    kube.tick()
    assert kube.condition("Admitted")["reason"] == "Preempted", "while it ends"
    kube.lingering = set()
    kube.admission = WAITS
    kube.tick(10.0)
    kube.tick(10.0)
    assert (kube.status["phase"], list_workloads(kube)) == ("Queued", [Ref("StatefulSet", "run-trainer")])
    assert kube.status["queue"] == {"since": since, "position": 2, "waiting": 5}
    kube.admission = ROOM
    kube.tick(10.0)
    assert kube.status["attempt"] == 2
    assert kube.status["checkpoint"]["latestCompleteStep"] == 7
    assert (kube.status["restartsCountedTowardsMax"], kube.status["checkpoint"]["stepsLostTotal"]) == (0, 0)


def test_preemption_posts_only_queue_events() -> None:
    """No user has edited `suspend` or the engine count, and no spot engine was lost."""
    kube = start_admitted_run()
    kube.told.clear()
    kube.admission = LOSES
    kube.tick()
    kube.tick(10.0)
    kube.tick(10.0)
    assert kube.condition("Suspended")["message"].startswith("no pod is left; ")
    assert kube.condition("Suspended")["message"].endswith(", when the queue has room for it")
    kube.admission = SOON
    kube.tick(10.0)
    kube.admission = WAITS
    kube.tick(10.0)
    kube.admission = ROOM
    kube.tick(10.0)
    told = [reason for _, reason in kube.told]
    expected = ["Preempted", "Suspending", "Suspended", "Queued", "Admitted", "AttemptStarted", "EnginesAvailable"]
    assert told == expected


def test_preempted_run_is_starting_after_its_next_admission() -> None:
    kube = start_admitted_run()
    kube.admission = LOSES
    kube.tick()
    kube.admission = WAITS
    kube.tick(10.0)
    kube.tick(10.0)
    kube.admission = ROOM
    kube.do(kube.decide())
    assert (kube.status["phase"], kube.status["attempt"]) == ("Starting", 1), "its pods are not made yet"


def test_run_readmitted_at_its_last_pod_starts_immediately() -> None:
    """A plan of the queue is valid for at least a second; this one is older than the preemption."""
    kube = start_admitted_run()
    kube.admission = LOSES
    kube.do(kube.decide())
    kube.admission = ROOM
    while kube.status["phase"] == "Suspending":
        kube.do(kube.decide())
        kube.controllers()
        kube.now += 1.0
    assert (kube.status["phase"], kube.status["attempt"]) == ("Starting", 1)
    assert kube.condition("Suspended")["message"].endswith(" are trained again, at once")
    kube.tick()
    assert kube.status["attempt"] == 2


def test_first_admission_after_a_suspension_is_pending() -> None:
    kube = Kube({**SPEC, "suspend": True})
    kube.admission = WAITS
    kube.tick()
    kube.edit(suspend=False)
    kube.tick(10.0)
    kube.admission = ROOM
    kube.do(kube.decide())
    assert (kube.status["phase"], kube.status["attempt"]) == ("Pending", 0)


def test_run_without_pods_is_released_like_any_other() -> None:
    kube = start_queued_run()
    kube.admission = ROOM
    kube.do(kube.decide())
    kube.admission = Admission(False, reasons.RELEASED, "not all of its pods got a node within 600 s", stops=True)
    kube.do(kube.decide())
    assert kube.status["phase"] == "Suspending"
    kube.admission = WAITS
    kube.tick(10.0)
    kube.tick(10.0)
    assert (kube.status["phase"], kube.status["attempt"], list_workloads(kube)) == ("Queued", 0, [])


def test_released_run_reports_the_scheduling_obstacle() -> None:
    kube = start_queued_run()
    kube.schedule = False
    kube.admission = ROOM
    kube.settle()
    for pod in kube.pods("trainer"):
        told = {
            "type": "PodScheduled",
            "status": "False",
            "reason": "Unschedulable",
            "message": "0/3 nodes are available",
        }
        pod["status"]["conditions"] = [told]
    kube.tick(60.0)
    scheduled = kube.condition("Scheduled")
    kube.admission = Admission(False, reasons.RELEASED, "not all of its pods got a node within 60 s", stops=True)
    kube.do(kube.decide())
    kept = f"not all of its pods got a node within 60 s ({scheduled['reason']}: {scheduled['message']})"
    assert scheduled["reason"] == "Unschedulable"
    assert kept in kube.status["message"]
    assert kube.condition("Admitted")["message"] == kept
    kube.tick(10.0)
    kube.tick(10.0)
    assert "spec.suspend" not in kube.condition("Admitted")["message"], "what the run is then does not explain it"


def test_suspended_run_leaves_the_queue_and_returns_as_new() -> None:
    kube = start_queued_run()
    since = kube.status["queue"]["since"]
    kube.edit(suspend=True)
    kube.tick(5.0)
    kube.tick(5.0)
    assert (kube.status["phase"], "queue" in kube.status) == ("Suspended", False)
    kube.edit(suspend=False)
    kube.tick(60.0)
    assert kube.status["phase"] == "Queued"
    assert list_workloads(kube) == []
    assert kube.status["queue"]["since"] > since


def test_ended_run_holds_no_admission() -> None:
    kube = start_admitted_run()
    kube.exit("orchestrator", 65)
    kube.tick()
    assert (kube.status["phase"], kube.condition("Admitted")["reason"]) == ("Failed", "RunOver")
    assert "queue" not in kube.status
