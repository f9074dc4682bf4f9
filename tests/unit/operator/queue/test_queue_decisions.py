"""A run with a queue: nothing is made before an admission is on record, and what is taken back is suspended, not killed."""

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


def queued() -> Kube:
    kube = Kube(SPEC)
    kube.admission = WAITS
    kube.tick()
    return kube


def running(step: int = 7) -> Kube:
    kube = Kube(SPEC)
    kube.admission = ROOM
    kube.start(step)
    kube.report(step, checkpoint_step=5)
    kube.tick()
    return kube


def workloads(kube: Kube) -> list[Ref]:
    return [ref for ref in kube.objects if ref.kind in ("StatefulSet", "Deployment", "Pod")]


def test_a_run_that_waits_has_no_pods_and_says_what_is_missing() -> None:
    kube = queued()
    assert workloads(kube) == []
    assert (kube.status["phase"], kube.status["reason"]) == ("Queued", "WaitingForResources")
    assert kube.status["message"] == f"position 2 of 5: {NEED}"
    assert (kube.status["queue"]["position"], kube.status["queue"]["waiting"]) == (2, 5)


def test_events_say_when_it_came_and_when_it_began() -> None:
    kube = queued()
    kube.tick(30.0)
    kube.admission = ROOM
    kube.tick()
    assert [reason for _, reason in kube.told][:3] == ["Queued", "Admitted", "AttemptStarted"]


def test_its_first_event_says_what_is_missing_although_the_queue_needs_a_moment() -> None:
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


def test_the_time_since_which_it_waits_stays() -> None:
    kube = queued()
    since = kube.status["queue"]["since"]
    kube.tick(60.0)
    assert kube.status["queue"]["since"] == since
    kube.admission = ROOM
    kube.tick(60.0)
    assert kube.status["queue"] == {"since": since}, "kept for the case that it is preempted, without a position"


def test_the_admission_is_on_record_before_anything_is_made() -> None:
    kube = queued()
    kube.admission = ROOM
    first = kube.decide()
    assert (first.create, first.apply, first.wake_in, first.urgency) == ((), (), 0.0, "now")
    kube.do(first)
    assert kube.condition("Admitted")["status"] == "True"
    second = kube.decide()
    assert {apply.manifest["kind"] for apply in second.apply} >= {"StatefulSet", "Deployment", "Pod"}


def test_a_decision_without_an_answer_says_nothing_of_a_queue() -> None:
    kube = Kube(SPEC).start(3)
    assert "queue" not in kube.status
    assert kube.condition("Admitted") == {}
    assert kube.status["phase"] == "Running"


def test_a_queue_that_is_turned_off_leaves_no_trace() -> None:
    kube = queued()
    kube.admission = None
    kube.start(2)
    assert "queue" not in kube.status
    assert kube.condition("Admitted") == {}
    assert kube.status["phase"] == "Running"


def test_a_run_that_ran_before_there_was_a_queue_goes_on() -> None:
    kube = Kube(SPEC).start(3)
    kube.admission = ROOM
    kube.tick()
    assert (kube.status["phase"], kube.condition("Admitted")["status"], kube.status["attempt"]) == (
        "Running",
        "True",
        1,
    )


def test_a_restart_keeps_its_admission() -> None:
    kube = running()
    kube.exit("trainer", 1)
    kube.tick()
    assert kube.condition("Admitted")["status"] == "True"
    kube.tick(60.0)
    assert kube.status["attempt"] == 2


def test_a_preempted_run_saves_gives_its_room_back_and_goes_on_from_there() -> None:
    kube = running()
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
    assert (kube.status["phase"], workloads(kube)) == ("Queued", [Ref("StatefulSet", "run-trainer")])
    assert kube.status["queue"] == {"since": since, "position": 2, "waiting": 5}
    kube.admission = ROOM
    kube.tick(10.0)
    assert kube.status["attempt"] == 2
    assert kube.status["checkpoint"]["latestCompleteStep"] == 7
    assert (kube.status["restartsCountedTowardsMax"], kube.status["checkpoint"]["stepsLostTotal"]) == (0, 0)


def test_events_of_a_preemption_are_the_queues_alone() -> None:
    """Nobody has edited `suspend` or the number of engines, and none of these was lost."""
    kube = running()
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


def test_a_preempted_run_whose_turn_has_come_is_starting() -> None:
    kube = running()
    kube.admission = LOSES
    kube.tick()
    kube.admission = WAITS
    kube.tick(10.0)
    kube.tick(10.0)
    kube.admission = ROOM
    kube.do(kube.decide())
    assert (kube.status["phase"], kube.status["attempt"]) == ("Starting", 1), "its pods are not made yet"


def test_a_run_that_has_room_at_the_moment_of_its_last_pod_waits_for_nothing() -> None:
    """A plan of the queue is believed for a second and more: this one was made before the run was stopped."""
    kube = running()
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


def test_a_run_whose_first_turn_has_come_after_a_suspension_is_pending() -> None:
    kube = Kube({**SPEC, "suspend": True})
    kube.admission = WAITS
    kube.tick()
    kube.edit(suspend=False)
    kube.tick(10.0)
    kube.admission = ROOM
    kube.do(kube.decide())
    assert (kube.status["phase"], kube.status["attempt"]) == ("Pending", 0)


def test_a_run_whose_pods_were_never_made_is_released_like_one_that_ran() -> None:
    kube = queued()
    kube.admission = ROOM
    kube.do(kube.decide())
    kube.admission = Admission(False, reasons.RELEASED, "not all of its pods got a node within 600 s", stops=True)
    kube.do(kube.decide())
    assert kube.status["phase"] == "Suspending"
    kube.admission = WAITS
    kube.tick(10.0)
    kube.tick(10.0)
    assert (kube.status["phase"], kube.status["attempt"], workloads(kube)) == ("Queued", 0, [])


def test_a_run_that_gives_its_room_back_tells_what_kept_its_pods_from_nodes() -> None:
    kube = queued()
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


def test_a_run_that_its_user_suspends_leaves_the_queue_and_comes_back_as_a_new_one() -> None:
    kube = queued()
    since = kube.status["queue"]["since"]
    kube.edit(suspend=True)
    kube.tick(5.0)
    kube.tick(5.0)
    assert (kube.status["phase"], "queue" in kube.status) == ("Suspended", False)
    kube.edit(suspend=False)
    kube.tick(60.0)
    assert kube.status["phase"] == "Queued"
    assert workloads(kube) == []
    assert kube.status["queue"]["since"] > since


def test_a_run_that_is_over_holds_no_admission_when_it_begins_again() -> None:
    kube = running()
    kube.exit("orchestrator", 65)
    kube.tick()
    assert (kube.status["phase"], kube.condition("Admitted")["reason"]) == ("Failed", "RunOver")
    assert "queue" not in kube.status
