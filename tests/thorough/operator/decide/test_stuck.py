"""Stalled runs: detection, consequences, and cases that are not stalls."""

from __future__ import annotations

from typing import Any

import pytest

from rlrun_operator.decide import stall
from rlrun_operator.decide.snapshot import RunSnapshot
from rlrun_operator.names import Ref
from rlrun_operator.settings import RenderSettings
from rlrun_operator.status.run_progress import read_lease
from rlrun_operator.times import format_rfc3339
from tests.unit.operator.decide.kube import EPOCH, Kube

WAITS = {"waiting_on": "trainer: training of step 4 since 12:03:04Z", "waiting_on_role": "trainer"}


def spec(**progress: Any) -> dict[str, Any]:
    return {"progress": {"deadlineSeconds": 100, "startupDeadlineSeconds": 300, **progress}}


def progressing(kube: Kube) -> tuple[str, str]:
    found = kube.condition("Progressing")
    return found["status"], found["reason"]


def last_failure(kube: Kube) -> dict[str, Any]:
    found: dict[str, Any] = kube.status.get("lastFailure") or {}
    return found


def test_hanging_run_is_restarted_with_its_waiting_role() -> None:
    kube = Kube(spec()).start()
    kube.hang(80, 3, **WAITS)
    assert progressing(kube) == ("True", "Training")
    kube.now += 21
    kube.report(3, **WAITS)
    kube.do(kube.decide())
    assert (progressing(kube), kube.status["phase"]) == (("False", "NoProgress"), "Running")
    assert kube.status["reason"] == "NoProgress"
    message = kube.status["message"]
    assert "progress.deadlineSeconds: 100" in message
    assert "it waits for trainer: training of step 4 since 12:03:04Z; the run is restarted, which counts" in message
    assert kube.told[-1] == ("Warning", "NoProgress")
    assert kube.status.get("restarts", 0) == 0, "what is not on record has no consequences"
    kube.do(kube.decide())
    failure = last_failure(kube)
    assert (failure["role"], failure["podName"], failure["nodeName"]) == ("trainer", "run-trainer-0", "node-1")
    assert (failure["reason"], failure["counted"], failure["step"]) == ("NoProgress", True, 3)
    assert "training of step 4" in failure["message"]
    assert "/logs/attempt_0001/trainer/*.stacks.txt" in failure["message"]
    assert kube.status["restartsCountedTowardsMax"] == 1
    assert kube.told[-1] == ("Warning", "AttemptFailed")
    kube.tick(1)
    assert (kube.status["attempt"], kube.status["phase"]) == (2, "Starting")
    assert progressing(kube)[1] == "WaitingForFirstStep", "the next attempt has a clock of its own"


def test_wait_for_storage_is_not_a_hang() -> None:
    kube = Kube(spec()).start()
    kube.hang(200, 3, storage="StorageFull: the volume is full: 0 MB of 10 GB are free", **WAITS)
    assert kube.status.get("restarts", 0) == 0
    assert progressing(kube)[1] != "NoProgress"
    kube.hang(80, 3, **WAITS)
    assert progressing(kube) == ("True", "Training")
    assert ("Warning", "NoProgress") not in kube.told, "with room again its clock begins anew"
    kube.hang(80, 3, **WAITS)
    assert ("Warning", "NoProgress") in kube.told


@pytest.mark.parametrize(
    ("action", "phase", "attempt"), [("Restart", "Running", 2), ("Fail", "Failed", 1), ("Report", "Running", 1)]
)
def test_progress_action_decides_the_consequence(action: str, phase: str, attempt: int) -> None:
    kube = Kube(spec(action=action)).start()
    kube.hang(140, 3, **WAITS)
    assert (kube.status["phase"], kube.status["attempt"]) == (phase, attempt)
    assert ("Warning", "NoProgress") in kube.told
    if action == "Fail":
        assert (kube.condition("Failed")["reason"], last_failure(kube)["reason"]) == ("NoProgress", "NoProgress")
        assert "trainer pod run-trainer-0: no step is done" in kube.status["message"]
        assert kube.pods("trainer") == []
    if action == "Report":
        kube.hang(300, 3, **WAITS)
        assert kube.told.count(("Warning", "NoProgress")) == 1
        kube.report(4)
        kube.tick()
        assert (progressing(kube), kube.status["attempt"]) == (("True", "Training"), 1)


def test_hangs_count_towards_max_restarts() -> None:
    kube = Kube(spec() | {"failurePolicy": {"maxRestarts": 1, "backoff": {"initialSeconds": 1}}}).start()
    kube.hang(140, 3, **WAITS)
    kube.report(4, resumed=3)
    kube.hang(140, 4, resumed=3, **WAITS)
    assert (kube.status["phase"], kube.condition("Failed")["reason"]) == ("Failed", "MaxRestartsExceeded")


@pytest.mark.parametrize("mark", ["step", "activity"])
def test_step_or_activity_resets_the_deadline(mark: str) -> None:
    kube = Kube(spec()).start()
    for number in range(4, 9):
        kube.hang(80, 3, activity=3)
        kube.now += 10
        kube.report(number if mark == "step" else 3, activity=number if mark == "activity" else 3)
    kube.settle()
    assert (progressing(kube)[1], kube.status["attempt"]) == ("Training", 1)


def test_silent_lease_is_not_a_hang() -> None:
    kube = Kube(spec()).start()
    kube.tick(5000)
    assert (progressing(kube)[1], kube.status["attempt"]) == ("HeartbeatLost", 1)
    kube.report(3)
    kube.tick()
    assert progressing(kube)[1] == "Training", "the steps of the silent time were not seen"
    kube.hang(80, 3)
    assert progressing(kube)[1] == "Training"
    kube.hang(60, 3)
    assert kube.status["attempt"] == 2


def freeze_orchestrator(**progress: Any) -> Kube:
    """Return a run whose orchestrator hangs during its work: its kubelet soon reports that it does not answer."""
    kube = Kube(spec(deadlineSeconds=30, **progress)).start()
    kube.tick(1)
    kube.report(4, **WAITS)
    kube.settle()
    kube.tick(15)
    kube.answers("orchestrator", ready=False)
    kube.settle()
    return kube


def test_hanging_orchestrator_is_blamed_after_the_deadline() -> None:
    kube = freeze_orchestrator()
    kube.tick(14)
    assert progressing(kube) == ("True", "Training")
    wake = kube.decide().wake_in
    assert wake is not None
    kube.now += wake
    kube.do(kube.decide())
    assert progressing(kube) == ("False", "NoProgress")
    assert "it waits for orchestrator: hanging since 2023-11-14T" in kube.condition("Progressing")["message"]
    assert "trainer: training" not in kube.condition("Progressing")["message"], "nobody knows what it waits for now"
    assert kube.status["progress"]["waitingOn"].startswith("orchestrator: hanging since ")
    kube.do(kube.decide())
    failure = last_failure(kube)
    assert (failure["role"], failure["podName"], failure["reason"]) == (
        "orchestrator",
        "run-orchestrator-1",
        "NoProgress",
    )
    assert "/logs/attempt_0001/orchestrator/*.stacks.txt" in failure["message"]
    assert kube.status["restartsCountedTowardsMax"] == 1


def test_deadline_longer_than_heartbeat_is_respected() -> None:
    kube = freeze_orchestrator()
    kube.edit(progress={"deadlineSeconds": 100})
    kube.tick(50)
    assert progressing(kube)[1] == "HeartbeatLost"
    kube.tick(34)
    assert (progressing(kube)[1], kube.status["attempt"]) == ("HeartbeatLost", 1)
    kube.tick(2)
    kube.tick(1)
    assert (last_failure(kube)["role"], kube.status["attempt"]) == ("orchestrator", 2)


def test_orchestrator_without_api_access_is_not_judged() -> None:
    """The orchestrator cannot reach the API server, but training continues."""
    kube = freeze_orchestrator()
    kube.answers("orchestrator", ready=True)
    for seconds in (16, 20, 5000):
        kube.tick(seconds)
        assert progressing(kube)[1] != "NoProgress"
    assert (progressing(kube)[1], kube.status["attempt"]) == ("HeartbeatLost", 1)


def test_unready_pod_of_lost_node_does_not_hang() -> None:
    kube = freeze_orchestrator()
    kube.answers("orchestrator", ready=True)
    kube.pod("orchestrator")["status"]["conditions"] = [{"type": "Ready", "status": "False"}]
    kube.tick(600)
    assert (progressing(kube)[1], kube.status["attempt"]) == ("HeartbeatLost", 1)


def test_slow_orchestrator_with_renewed_lease_is_trusted() -> None:
    kube = freeze_orchestrator()
    kube.tick(5)
    kube.report(4, **WAITS)
    kube.tick(11)
    kube.tick(1)
    assert (last_failure(kube)["role"], last_failure(kube)["reason"]) == ("trainer", "NoProgress")


def test_operator_wakes_after_missed_renewals() -> None:
    kube = freeze_orchestrator()
    kube.report(4, **WAITS)
    kube.tick(15)
    assert progressing(kube) == ("True", "Training"), "the deadline is over; what it waited for was said too long ago"
    case = RunSnapshot(kube.look(), kube.now, RenderSettings(), fresh_key="", random=0.5)
    assert stall.wake_in(case, read_lease(case.observed.lease, 1)) == pytest.approx(15)
    kube.tick(15)
    kube.tick(1)
    assert last_failure(kube)["role"] == "orchestrator"


def test_hang_during_start_is_blamed_on_orchestrator() -> None:
    kube = Kube(spec())
    kube.settle()
    kube.tick(1)
    kube.hang(250, 0, **WAITS)
    kube.answers("orchestrator", ready=False)
    for _ in range(3):
        kube.tick(25)
    assert (last_failure(kube)["role"], last_failure(kube)["reason"]) == ("orchestrator", "NoProgress")


@pytest.mark.parametrize("seconds", [40, 300])
@pytest.mark.parametrize("spoke", [False, True])
def test_silent_start_with_ready_pods_is_not_a_hang(spoke: bool, seconds: int) -> None:
    """A NetworkPolicy blocks the API server: the orchestrator trains but cannot report."""
    kube = Kube(spec(startupDeadlineSeconds=seconds))
    kube.settle()
    kube.tick(1)
    if spoke:
        kube.report(0, **WAITS)
        kube.settle()
    for _ in range(100):
        kube.tick(10)
    assert (progressing(kube), kube.status["attempt"]) == (("Unknown", "HeartbeatLost"), 1)
    assert kube.told.count(("Warning", "HeartbeatLost")) == 1
    message = kube.condition("Progressing")["message"]
    assert "NetworkPolicy run-egress opens any host on port 443, 6443 to it" in message
    assert "set networkPolicy.apiServer in the chart's values" in message
    kube.report(5)
    kube.settle()
    assert progressing(kube) == ("True", "Training")


@pytest.mark.parametrize("ready", [True, False])
def test_operator_wakes_after_readiness_is_recorded(ready: bool) -> None:
    """No other event may occur for a silent run."""
    kube = Kube(spec())
    kube.make_ready = not ready
    kube.settle()
    for _ in range(8):
        kube.tick(10)
    if ready:
        kube.make_ready = True
        kube.controllers()
    kube.answers("orchestrator", ready=ready)
    wake = kube.decide().wake_in
    kube.do(kube.decide())
    assert wake is not None
    assert wake <= 2
    kube.now += wake
    wake = kube.decide().wake_in
    assert wake is not None
    assert wake <= (60 if ready else 300)


@pytest.mark.parametrize(("role", "spoke"), [("orchestrator", False), ("orchestrator", True), ("trainer", False)])
def test_silent_start_with_unready_pod_is_restarted(role: str, spoke: bool) -> None:
    kube = Kube(spec())
    kube.settle()
    kube.tick(1)
    if spoke:
        kube.report(0, **WAITS)
        kube.settle()
    for _ in range(20):
        kube.tick(50)
    kube.answers(role, ready=False)
    kube.settle()
    for _ in range(29):
        kube.tick(10)
    assert (kube.status["attempt"], kube.status.get("restarts", 0)) == (1, 0), (
        "its deadline begins when it is not ready"
    )
    for _ in range(3):
        kube.tick(10)
    assert (last_failure(kube)["role"], last_failure(kube)["reason"]) == (role, "NoProgress")


def test_unready_silent_run_gets_a_full_deadline() -> None:
    kube = Kube(spec()).start()
    for _ in range(20):
        kube.tick(50)
    kube.answers("orchestrator", ready=False)
    kube.settle()
    kube.tick(90)
    kube.answers("orchestrator", ready=True)
    kube.settle()
    for _ in range(5):
        kube.tick(50)
    assert (progressing(kube)[1], kube.status["attempt"]) == ("HeartbeatLost", 1), "it got on"
    kube.answers("orchestrator", ready=False)
    kube.settle()
    kube.tick(99)
    assert kube.status["attempt"] == 1
    kube.tick(2)
    kube.tick(1)
    assert (last_failure(kube)["role"], last_failure(kube)["reason"]) == ("orchestrator", "NoProgress")


def test_deleted_lease_of_old_run_is_not_a_hang() -> None:
    kube = Kube(spec()).start()
    for _ in range(10):
        kube.hang(80, 3, activity=kube.now)
    kube.delete(Ref("Lease", "run-progress"))
    kube.now += 2
    kube.do(kube.decide())
    kube.do(kube.decide())
    kube.settle()
    for _ in range(4):
        kube.tick(2)
    assert (kube.status["attempt"], kube.status.get("restarts", 0)) == (1, 0)
    assert ("Warning", "NoProgress") not in kube.told
    assert ("Warning", "HeartbeatLost") not in kube.told


def test_outage_or_new_operator_resets_both_clocks() -> None:
    running, starting = Kube(spec()).start(), Kube(spec())
    starting.make_ready = False
    starting.settle()
    starting.tick()
    for kube in (running, starting):
        kube.now += 5000  # no operator is watching
        kube.watching_since = kube.now
        if kube is running:  # the store does the same
            kube.lease_changed_at = kube.lease_moved_at = kube.now
        kube.settle()
        assert (kube.status["attempt"], kube.status.get("restarts", 0)) == (1, 0)
    running.hang(140, 3)
    starting.tick(301)
    starting.tick(1)
    starting.tick(1)
    assert (running.status["attempt"], starting.status["attempt"]) == (2, 2)


def test_new_operator_has_no_deadline_clock() -> None:
    kube = Kube(spec()).start()
    kube.watching_since = None
    kube.hang(1000, 3)
    assert (progressing(kube)[1], kube.status["attempt"]) == ("Training", 1)


def test_first_step_deadline_starts_when_pods_have_nodes() -> None:
    kube = Kube(spec())
    kube.schedule = False
    kube.settle()
    kube.tick(5000)
    assert kube.condition("Progressing")["reason"] == "WaitingForFirstStep", "waiting for GPUs is no hang"
    kube.schedule = True
    kube.tick(1)
    loads = {"waiting_on": "trainer: loading the model since 12:00:00Z", "waiting_on_role": "trainer"}
    kube.hang(280, 0, **loads)
    kube.tick(19)
    assert (kube.status["phase"], progressing(kube)[1]) == ("Starting", "WaitingForFirstStep")
    kube.now += 2
    kube.report(0, **loads)
    kube.do(kube.decide())
    assert (kube.status["phase"], progressing(kube)) == ("Starting", ("False", "NoProgress"))
    assert "progress.startupDeadlineSeconds: 300" in kube.condition("Progressing")["message"]
    assert "trainer: loading the model since 12:00:00Z" in kube.condition("Progressing")["message"]
    kube.do(kube.decide())
    assert (last_failure(kube)["reason"], kube.status["restartsCountedTowardsMax"]) == ("NoProgress", 1)


def test_silent_start_blames_the_unready_pod() -> None:
    kube = Kube(spec())
    kube.make_ready = False
    kube.settle()
    kube.tick(1)
    kube.objects[Ref("Pod", "run-trainer-0")]["status"] |= {"phase": "Running", "conditions": []}
    kube.tick(301)
    kube.tick(1)
    kube.tick(1)
    assert (last_failure(kube)["role"], last_failure(kube)["reason"]) == ("trainer", "NoProgress")


def test_time_before_attempt_and_restart_does_not_count() -> None:
    kube = Kube(spec() | {"failurePolicy": {"backoff": {"initialSeconds": 500, "maxSeconds": 500}}}).start()
    for _ in range(2):  # the second restart has a backoff
        kube.exit("trainer", 1)
        kube.tick(1)
    assert kube.status["phase"] == "Restarting"
    kube.tick(700)
    kube.tick(1)
    kube.tick(1)
    assert (kube.status["attempt"], kube.status["restarts"]) == (3, 2)
    for condition in kube.status["conditions"]:  # its pods had nodes so soon that no pass saw them without
        if condition["type"] == "Scheduled":
            condition["lastTransitionTime"] = format_rfc3339(EPOCH)
    kube.settle()
    assert (kube.status["attempt"], progressing(kube)[1]) == (3, "WaitingForFirstStep")


def test_progress_deadline_can_be_edited() -> None:
    kube = Kube(spec(action="Report")).start()
    kube.hang(140, 3)
    assert progressing(kube)[1] == "NoProgress"
    kube.edit(progress={"deadlineSeconds": 1000})
    kube.tick(1)
    assert (progressing(kube)[1], kube.condition("ConfigurationValid")["reason"]) == ("Training", "Valid")


def test_operator_wakes_at_the_deadline() -> None:
    kube = Kube(spec(deadlineSeconds=40)).start()
    kube.report(3)
    wake = kube.decide().wake_in
    assert wake is not None
    assert wake == pytest.approx(kube.lease_moved_at + 40 - kube.now if kube.lease_moved_at else 0)
    kube.now += wake - 5
    kube.report(3)
    kube.now += 5
    assert kube.decide().wake_in == 2.0, "the condition is written, then acted on"
    assert kube.now > EPOCH


def guest_of(host: Kube) -> Kube:
    guest = Kube({"trainer": {"sharedWith": "host", "lora": {"rank": 4}}, **spec()}, name="guest", uid="uid-g")
    guest.host, guest.guests, host.guests = host, [guest], [guest]
    return guest


def test_guest_reports_stall_without_restarting() -> None:
    host = Kube(
        {"trainer": {"lora": {"rank": 4, "slots": 2}, "guests": ["*"]}, **spec(action="Report")},
        name="host",
        uid="uid-h",
    )
    host.start()
    guest = guest_of(host)
    guest.start()
    for _ in range(20):
        host.hang(20, 3)
        guest.now = host.now
        guest.report(3, **WAITS)
        guest.settle()
    assert host.condition("Progressing")["reason"] == "NoProgress"
    assert (progressing(guest), guest.status["attempt"]) == (("False", "NoProgress"), 1)
    assert "its host, whose trainer it uses, does not get on either" in guest.status["message"]
    host.report(4)
    host.tick()
    for _ in range(3):
        guest.now = host.now
        guest.tick()
    assert (last_failure(guest)["reason"], last_failure(guest)["podName"]) == ("NoProgress", "host-trainer-0")


def test_guest_deadline_is_longer_than_its_hosts() -> None:
    host = Kube({"trainer": {"lora": {"rank": 4, "slots": 2}, "guests": ["*"]}}, name="host", uid="uid-h")
    host.start()
    guest = guest_of(host)
    guest.start()
    found = {}
    for seconds in range(20, 260, 20):
        guest.now += 20
        guest.report(3, **WAITS)
        guest.do(guest.decide())
        found[seconds] = progressing(guest)[0]
    assert (found[200], found[240]) == ("True", "False"), "deadlineSeconds is 100, the margin 120"
