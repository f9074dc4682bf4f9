"""Steps of the Kueue integration in their order, and the known mistakes of other integrations."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest

from rlrun_operator.providers import kueue_workload as objects
from rlrun_operator.providers.kueue import next_step
from rlrun_operator.providers.kueue_workload import REASONS
from rlrun_operator.providers.queue_answers import (
    SHAPE_ANNOTATION,
    Create,
    Edit,
    Flavor,
    Priority,
    PutStatus,
    QueuedRun,
    Remove,
    Step,
    name_of,
)
from tests.support.kueue import RefusedError, StandIn, condition, is_true, judge

Json = dict[str, Any]
NOW = 1_700_000_000.0
SETS: tuple[Json, ...] = (
    {"name": "trainer", "count": 2, "template": {"spec": {"containers": [{"name": "trainer"}]}}},
    {"name": "inference", "count": 2, "template": {"spec": {"containers": [{"name": "inference"}]}}},
    {"name": "orchestrator", "count": 1, "template": {"spec": {"containers": [{"name": "orchestrator"}]}}},
)
WAITS = QueuedRun("math", "team-a", "uid-1", "team-a", SETS, engines=2)
RUNS = replace(WAITS, holds=True, begins=False)
READY = replace(RUNS, ready=True)
FLAVORS = {"h100": Flavor({"cloud/gpu": "h100"}, ({"key": "gpu", "operator": "Exists"},))}
KUEUE = StandIn()


def make_workload(run: QueuedRun = WAITS) -> Json:
    """The run's Workload before Kueue has processed it."""
    return {**objects.made_for(run), "status": {}}


def admit_workload(run: QueuedRun = WAITS, kueue: StandIn = KUEUE) -> Json:
    """The run's admitted Workload."""
    return kueue.act([make_workload(run)])[0]


def decide_step(run: QueuedRun, workload: Json | None) -> Step:
    return next_step(run, workload, flavors=FLAVORS, now=NOW)


def apply_step(run: QueuedRun, workload: Json) -> Json:
    """Workload after the step's write, if the webhooks admit it."""
    write = decide_step(run, workload).write
    assert isinstance(write, PutStatus), write
    new = {**workload, "status": copy.deepcopy(dict(write.status))}
    judge(workload, new)
    return new


# ---- admit -> start


def test_waiting_run_creates_a_valid_workload() -> None:
    write = decide_step(WAITS, None).write
    assert isinstance(write, Create)
    judge(None, dict(write.manifest))
    manifest = write.manifest
    assert manifest["metadata"]["labels"]["kueue.x-k8s.io/job-uid"] == "uid-1"
    assert "finalizers" not in manifest["metadata"], "mistake 4: nobody would remove it"
    assert manifest["metadata"]["ownerReferences"][0]["controller"] is True, "mistake 8"
    assert [(one["name"], one["count"]) for one in manifest["spec"]["podSets"]] == [
        ("trainer", 2),
        ("inference", 2),
        ("orchestrator", 1),
    ]


def test_workload_name_is_stable_and_fits_into_a_label() -> None:
    assert name_of("math", "uid-1") == name_of("math", "uid-1") != name_of("math", "uid-2")
    name = name_of("m" * 60, "uid-1")
    assert len(name) <= 63, "mistake 12: two Workloads of one owner"


@pytest.mark.parametrize(("theirs", "ours"), sorted(REASONS.items()))
def test_waiting_reason_contains_the_message_of_kueue(theirs: str, ours: str) -> None:
    one = make_workload()
    KUEUE._say(one, "QuotaReserved", False, theirs, "8 more needed")
    answer = decide_step(replace(WAITS, holds=False), {**one, "status": apply_step(WAITS, one)["status"]}).answer
    assert (answer.admitted, answer.stops, answer.reason) == (False, False, ours)
    assert answer.message == f"LocalQueue team-a: 8 more needed ({theirs})"


_TOO_LARGE = (
    "insufficient quota for gpu in flavor h100, previously considered podsets requests (0) + current podset request (16) "
    "> maximum capacity (8)"
)
_BUSY = "insufficient unused quota for gpu in flavor a100, 8 more needed"


@pytest.mark.parametrize(
    ("message", "ours"),
    [
        (_TOO_LARGE, "NeverFits"),
        (f"{_TOO_LARGE}, {_BUSY}", "WaitingForResources"),
        (_BUSY, "WaitingForResources"),
        ("resource tpu unavailable in ClusterQueue", "NeverFits"),
    ],
)
def test_oversized_run_before_kueue_019_is_recognized_by_message(message: str, ours: str) -> None:
    one = make_workload()
    KUEUE._say(one, "QuotaReserved", False, "Pending", f"couldn't assign flavors to pod set trainer: {message}")
    assert (
        decide_step(replace(WAITS, holds=False), {**one, "status": apply_step(WAITS, one)["status"]}).answer.reason
        == ours
    )


def test_quota_without_admission_checks_starts_nothing() -> None:
    kueue = StandIn(checked=True)
    one = admit_workload(kueue=kueue)
    assert is_true(one, "QuotaReserved")
    answer = decide_step(WAITS, one).answer
    assert not answer.admitted, "mistake 1"
    assert answer.message.endswith("admission checks: capacity is Pending (nodes are being made)")
    assert decide_step(WAITS, kueue.approve(one)).answer.admitted


def test_admission_adds_flavors_and_labels_to_pods() -> None:
    answer = decide_step(WAITS, admit_workload()).answer
    placed = answer.placed["trainer"]
    assert dict(placed.node_selector) == {"cloud/gpu": "h100"}
    assert placed.tolerations == ({"key": "gpu", "operator": "Exists"},)
    assert dict(placed.labels) == {
        "kueue.x-k8s.io/podset": "trainer",
        "kueue.x-k8s.io/local-queue-name": "team-a",
        "kueue.x-k8s.io/cluster-queue-name": "gpus",
    }
    assert "kueue.x-k8s.io/queue-name" not in placed.labels, "mistake 7"
    assert dict(placed.annotations) == {"kueue.x-k8s.io/workload": name_of("math", "uid-1")}
    assert answer.message == "admitted by ClusterQueue gpus, flavor h100"


def test_unrequested_topology_is_annotated_and_gated() -> None:
    kueue = StandIn()
    kueue.topology = True
    placed = decide_step(WAITS, admit_workload(kueue=kueue)).answer.placed["trainer"]
    assert placed.scheduling_gates == ("kueue.x-k8s.io/topology",)
    assert placed.annotations["kueue.x-k8s.io/podset-unconstrained-topology"] == "true"


def test_check_updates_are_merged_and_contradictions_reported() -> None:
    kueue = StandIn(checked=True)
    kueue.updates = [{"name": "trainer", "labels": {"zone": "b"}, "nodeSelector": {"cloud/nodes": "n1"}}]
    answer = decide_step(WAITS, kueue.approve(admit_workload(kueue=kueue))).answer
    assert answer.placed["trainer"].node_selector == {"cloud/gpu": "h100", "cloud/nodes": "n1"}
    assert answer.placed["trainer"].labels["zone"] == "b"
    assert (answer.conflict, "zone" in answer.placed["inference"].labels) == ("", False)
    kueue.updates[0]["nodeSelector"]["cloud/gpu"] = "a100"
    answer = decide_step(WAITS, kueue.approve(admit_workload(kueue=kueue))).answer
    assert (
        answer.conflict
        == "admission check capacity sets nodeSelector cloud/gpu=a100 for pods of trainer, another one h100"
    )


def test_readiness_conditions_follow_the_sequence_of_kueue() -> None:
    one = admit_workload()
    seen = []
    for run in (RUNS, READY, RUNS, READY, RUNS, READY):
        one = apply_step(run, one)
        assert decide_step(run, one).write is None, "told once"
        seen.append((condition(one, "PodsReady")["status"], condition(one, "PodsReady")["reason"]))
    assert seen == [
        ("False", "WaitForStart"),
        ("True", "Started"),
        ("False", "WaitForRecovery"),
        ("True", "Recovered"),
        ("False", "WaitForRecovery"),
        ("True", "Recovered"),
    ]


def test_status_is_complete_and_times_change_only_with_status() -> None:
    one = admit_workload()
    one["status"]["admissionChecks"] = [{"name": "x", "state": "Ready"}]
    first = apply_step(READY, one)
    assert {c["type"] for c in first["status"]["conditions"]} == {"QuotaReserved", "Admitted", "PodsReady"}
    assert first["status"]["admissionChecks"] == one["status"]["admissionChecks"]
    later = objects.with_conditions(first, {"PodsReady": (True, "Recovered", "x")}, NOW + 100)
    assert later["conditions"][-1]["lastTransitionTime"] == condition(first, "PodsReady")["lastTransitionTime"]


# ---- eviction


EVICTIONS = [
    ("preempt", "Preempted", True, "Preempted"),
    ("time_out", "Evicted", False, "PodsReadyTimeout"),
    ("lose_node", "Evicted", True, "NodeFailures"),
    ("deactivate", "Evicted", False, "DeactivatedDueToRequeuingLimitExceeded"),
]


@pytest.mark.parametrize(("how", "reason", "requeued", "theirs"), EVICTIONS, ids=[row[0] for row in EVICTIONS])
def test_evicted_run_releases_quota_after_its_last_pod(how: str, reason: str, requeued: bool, theirs: str) -> None:
    one = getattr(KUEUE, how)(apply_step(READY, admit_workload()))
    while_it_stops = decide_step(READY, one)
    assert (while_it_stops.answer.stops, while_it_stops.answer.reason) == (True, reason)
    assert while_it_stops.answer.message.endswith(f"({theirs})")
    assert while_it_stops.write is None, "mistake 2: pods are there"
    gone = apply_step(WAITS, one)
    assert "admission" not in gone["status"], "mistake 3: never cleared"
    for kind in ("QuotaReserved", "Admitted", "PodsReady"):
        assert not is_true(gone, kind)
    assert condition(gone, "PodsReady")["reason"] == "WaitForStart"
    assert is_true(gone, "Requeued") == requeued, "mistake 9: no back-off"
    assert condition(gone, "Requeued")["reason"] == theirs.partition("DueTo")[0], "else active again is not enough"
    assert is_true(gone, "Evicted"), "Kueue's to change"
    assert not decide_step(WAITS, gone).answer.admitted
    assert decide_step(WAITS, gone).write is None


def test_backing_off_run_reports_the_retry_time() -> None:
    one = apply_step(WAITS, KUEUE.time_out(apply_step(READY, admit_workload())))
    answer = decide_step(WAITS, one).answer
    assert answer.reason == "BackingOff"
    assert answer.message.endswith(
        "evicted the run once, because not all pods were ready in time; it retries at 2026-01-01T00:01:00Z"
    )


def test_deactivated_workload_reports_the_fix() -> None:
    one = apply_step(WAITS, KUEUE.deactivate(apply_step(READY, admit_workload())))
    answer = decide_step(WAITS, one).answer
    assert answer.reason == "WorkloadDeactivated"
    assert "DeactivatedDueToRequeuingLimitExceeded" in answer.message
    assert f"set spec.active of Workload {one['metadata']['name']} to true" in answer.message


def test_inactive_workload_admits_nothing() -> None:
    one = admit_workload()
    one["spec"]["active"] = False
    assert decide_step(WAITS, one) == Step(decide_step(WAITS, one).answer, None)
    assert not decide_step(WAITS, one).answer.admitted
    assert decide_step(READY, one).answer.stops


def test_run_without_its_admission_stops() -> None:
    assert decide_step(READY, make_workload()).answer.stops


def test_manually_deleted_workload_evicts_the_run() -> None:
    assert (decide_step(READY, None).answer.stops, decide_step(READY, None).write) == (True, None)
    one = admit_workload()
    one["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    assert (decide_step(READY, one).answer.stops, decide_step(READY, one).write) == (True, None)
    assert (decide_step(WAITS, one).answer.admitted, decide_step(WAITS, one).write) == (False, None), (
        "its successor has to wait"
    )
    assert isinstance(decide_step(WAITS, None).write, Create)


# ---- suspension by the user


def test_suspended_workload_is_deactivated_after_the_last_pod() -> None:
    one = apply_step(READY, admit_workload())
    assert decide_step(replace(READY, suspended=True), one).write is None
    rest = replace(WAITS, suspended=True)
    write = decide_step(rest, one).write
    assert isinstance(write, Edit)
    assert write.patch["spec"] == {"active": False}
    one["spec"]["active"] = False
    one["metadata"]["annotations"] |= write.patch["metadata"]["annotations"]
    assert decide_step(rest, one).write is None, "until Kueue has evicted it"
    early = decide_step(WAITS, one)
    assert (early.answer.admitted, early.write) == (False, None), "its quota may be another's by now"
    one = KUEUE.act([one])[0]
    gone = apply_step(rest, one)
    assert "admission" not in gone["status"]
    assert condition(gone, "Requeued")["reason"] == "Deactivated"
    assert decide_step(rest, gone).write is None
    back = decide_step(WAITS, gone)
    assert isinstance(back.write, Edit)
    assert back.write.patch == {
        "metadata": {"annotations": {objects.SUSPENDED_ANNOTATION: None}},
        "spec": {"active": True},
    }
    assert not back.answer.admitted


def test_run_created_suspended_has_no_workload() -> None:
    assert decide_step(replace(WAITS, suspended=True), None).write is None


# ---- end of the run


@pytest.mark.parametrize("outcome", ["Succeeded", "Failed"])
def test_ended_run_finishes_its_workload_after_its_pods(outcome: Any) -> None:
    one = apply_step(READY, admit_workload())
    over = replace(WAITS, over=outcome, outcome="100/100 steps")
    assert decide_step(replace(over, holds=True), one).write is None
    done = apply_step(over, one)
    assert (condition(done, "Finished")["reason"], is_true(done, "Finished")) == (outcome, True)
    assert decide_step(over, done).write is None
    assert decide_step(over, None).write is None, "mistake 10: made again for a finished run"


def test_restarted_run_gets_a_new_workload() -> None:
    done = apply_step(replace(WAITS, over="Failed"), apply_step(READY, admit_workload()))
    assert isinstance(decide_step(WAITS, done).write, Remove)
    assert not decide_step(WAITS, done).answer.admitted


def test_workload_finished_by_kueue_stops_its_run() -> None:
    one = apply_step(READY, admit_workload())
    KUEUE._say(one, "Finished", True, "OutOfSync", "the prebuilt workload is out of sync")
    answer = decide_step(READY, one).answer
    assert answer.stops, "mistake 5"
    assert "out of sync (OutOfSync)" in answer.message


# ---- shape


def change_engines(run: QueuedRun, count: int) -> QueuedRun:
    sets = tuple({**one, "count": count} if one["name"] == "inference" else one for one in run.pod_sets)
    return replace(run, pod_sets=sets, engines=count)


def test_changed_shape_is_updated_before_quota_is_reserved() -> None:
    one = make_workload()
    write = decide_step(change_engines(WAITS, 4), one).write
    assert isinstance(write, Edit)
    assert write.patch["spec"]["podSets"][1]["count"] == 4
    assert write.patch["metadata"]["annotations"][SHAPE_ANNOTATION] == objects.shape_of(change_engines(WAITS, 4))


def test_run_larger_than_its_admission_stops_and_reapplies() -> None:
    one = apply_step(READY, admit_workload())
    with pytest.raises(RefusedError, match=r"spec.podSets: immutable"):
        judge(one, {**one, "spec": {**one["spec"], "podSets": list(change_engines(WAITS, 4).pod_sets)}})
    answer = decide_step(change_engines(READY, 4), one).answer
    assert (answer.stops, answer.reason) == (True, "Evicted")
    assert isinstance(decide_step(change_engines(WAITS, 4), one).write, Remove)


def test_fewer_engines_keep_admission_and_other_pods_lose_it() -> None:
    one = apply_step(READY, admit_workload())
    between = replace(READY, begins=True)
    assert not decide_step(change_engines(READY, 1), one).answer.stops
    assert not decide_step(change_engines(between, 1), one).answer.stops
    assert isinstance(decide_step(change_engines(WAITS, 1), one).write, Remove), (
        "before it has any pod it asks for what it needs"
    )
    moved = (*SETS[:2], {**SETS[2], "template": {"spec": {"nodeSelector": {"a": "b"}}}})
    assert not decide_step(replace(READY, pod_sets=moved), one).answer.stops
    assert decide_step(replace(between, pod_sets=moved), one).answer.stops


def test_changed_queue_changes_the_shape() -> None:
    write = decide_step(replace(WAITS, queue="team-b"), make_workload()).write
    assert isinstance(write, Edit)
    assert write.patch["spec"]["queueName"] == "team-b"


def test_invalid_spec_neither_requests_room_nor_stops_run() -> None:
    assert decide_step(replace(WAITS, pod_sets=()), None).write is None
    one = apply_step(READY, admit_workload())
    assert decide_step(replace(READY, pod_sets=()), one).answer.admitted


# ---- priority


def test_priority_is_a_number_with_an_optional_class() -> None:
    assert objects.made_for(replace(WAITS, priority=Priority(7)))["spec"]["priority"] == 7
    with_class = replace(WAITS, priority=Priority(1000, "kueue.x-k8s.io", "WorkloadPriorityClass", "production"))
    spec = objects.made_for(with_class)["spec"]
    assert (spec["priority"], spec["priorityClassRef"]["name"]) == (1000, "production")
    judge(None, objects.made_for(with_class))


def test_edited_priority_updates_a_waiting_workload() -> None:
    one = make_workload()
    KUEUE._say(one, "QuotaReserved", False, "WaitingForQuota", "")
    one = apply_step(WAITS, one)
    write = decide_step(replace(WAITS, priority=Priority(7)), one).write
    assert isinstance(write, Edit)
    assert write.patch["spec"] == {"priority": 7, "priorityClassRef": None}
    assert decide_step(replace(READY, priority=Priority(7)), apply_step(READY, admit_workload())).write is None


def test_foreign_workload_of_the_same_name_is_kept() -> None:
    one = make_workload(replace(WAITS, uid="uid-2"))
    answer = decide_step(WAITS, one)
    assert (answer.write, answer.answer.reason) == (None, "QueueUnavailable")
