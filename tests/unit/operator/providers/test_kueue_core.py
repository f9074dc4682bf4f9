"""Each row of Kueue's order of steps, and each mistake that integrations are known to make."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest

from rlrun_operator.providers import Create, Edit, Flavor, Priority, PutStatus, Remove, Step, Subject, next_step
from rlrun_operator.providers import kueue_workload as objects
from rlrun_operator.providers.kueue_workload import REASONS
from tests.support.kueue import RefusedError, StandIn, condition, is_true, judge

Json = dict[str, Any]
NOW = 1_700_000_000.0
SETS: tuple[Json, ...] = (
    {"name": "trainer", "count": 2, "template": {"spec": {"containers": [{"name": "trainer"}]}}},
    {"name": "inference", "count": 2, "template": {"spec": {"containers": [{"name": "inference"}]}}},
    {"name": "orchestrator", "count": 1, "template": {"spec": {"containers": [{"name": "orchestrator"}]}}},
)
WAITS = Subject("math", "team-a", "uid-1", "team-a", SETS, engines=2)
RUNS = replace(WAITS, holds=True, begins=False)
READY = replace(RUNS, ready=True)
FLAVORS = {"h100": Flavor({"cloud/gpu": "h100"}, ({"key": "gpu", "operator": "Exists"},))}
KUEUE = StandIn()


def made(run: Subject = WAITS) -> Json:
    """The run's Workload before Kueue has said anything."""
    return {**objects.made_for(run), "status": {}}


def admitted(run: Subject = WAITS, kueue: StandIn = KUEUE) -> Json:
    """The run's Workload, admitted."""
    return kueue.act([made(run)])[0]


def ask(run: Subject, workload: Json | None) -> Step:
    return next_step(run, workload, flavors=FLAVORS, now=NOW)


def after(run: Subject, workload: Json) -> Json:
    """The Workload after the step's write, which the webhooks let in."""
    write = ask(run, workload).write
    assert isinstance(write, PutStatus), write
    new = {**workload, "status": copy.deepcopy(dict(write.status))}
    judge(workload, new)
    return new


# ---- admit -> start


def test_a_run_that_waits_gets_a_workload_that_kueue_lets_in() -> None:
    write = ask(WAITS, None).write
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


def test_a_name_is_the_same_for_each_life_of_the_operator_and_fits_into_a_label() -> None:
    assert objects.name_of("math", "uid-1") == objects.name_of("math", "uid-1") != objects.name_of("math", "uid-2")
    name = objects.name_of("m" * 60, "uid-1")
    assert len(name) <= 63, "mistake 12: two Workloads of one owner"


@pytest.mark.parametrize(("theirs", "ours"), sorted(REASONS.items()))
def test_what_a_run_waits_for_is_in_kueues_words(theirs: str, ours: str) -> None:
    one = made()
    KUEUE._say(one, "QuotaReserved", False, theirs, "8 more needed")
    answer = ask(replace(WAITS, holds=False), {**one, "status": after(WAITS, one)["status"]}).answer
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
def test_before_019_a_run_that_never_fits_is_known_by_the_message(message: str, ours: str) -> None:
    one = made()
    KUEUE._say(one, "QuotaReserved", False, "Pending", f"couldn't assign flavors to pod set trainer: {message}")
    assert ask(replace(WAITS, holds=False), {**one, "status": after(WAITS, one)["status"]}).answer.reason == ours


def test_quota_alone_starts_nothing() -> None:
    kueue = StandIn(checked=True)
    one = admitted(kueue=kueue)
    assert is_true(one, "QuotaReserved")
    answer = ask(WAITS, one).answer
    assert not answer.admitted, "mistake 1"
    assert answer.message.endswith("admission checks: capacity is Pending (nodes are being made)")
    assert ask(WAITS, kueue.approve(one)).answer.admitted


def test_an_admission_brings_flavors_and_marks_into_the_pods() -> None:
    answer = ask(WAITS, admitted()).answer
    placed = answer.placed["trainer"]
    assert dict(placed.node_selector) == {"cloud/gpu": "h100"}
    assert placed.tolerations == ({"key": "gpu", "operator": "Exists"},)
    assert dict(placed.labels) == {
        "kueue.x-k8s.io/podset": "trainer",
        "kueue.x-k8s.io/local-queue-name": "team-a",
        "kueue.x-k8s.io/cluster-queue-name": "gpus",
    }
    assert "kueue.x-k8s.io/queue-name" not in placed.labels, "mistake 7"
    assert dict(placed.annotations) == {"kueue.x-k8s.io/workload": objects.name_of("math", "uid-1")}
    assert answer.message == "admitted by ClusterQueue gpus, flavor h100"


def test_a_topology_that_was_not_asked_for_is_marked_and_gated() -> None:
    kueue = StandIn()
    kueue.topology = True
    placed = ask(WAITS, admitted(kueue=kueue)).answer.placed["trainer"]
    assert placed.scheduling_gates == ("kueue.x-k8s.io/topology",)
    assert placed.annotations["kueue.x-k8s.io/podset-unconstrained-topology"] == "true"


def test_updates_of_checks_are_merged_and_a_contradiction_is_named() -> None:
    kueue = StandIn(checked=True)
    kueue.updates = [{"name": "trainer", "labels": {"zone": "b"}, "nodeSelector": {"cloud/nodes": "n1"}}]
    answer = ask(WAITS, kueue.approve(admitted(kueue=kueue))).answer
    assert answer.placed["trainer"].node_selector == {"cloud/gpu": "h100", "cloud/nodes": "n1"}
    assert answer.placed["trainer"].labels["zone"] == "b"
    assert (answer.conflict, "zone" in answer.placed["inference"].labels) == ("", False)
    kueue.updates[0]["nodeSelector"]["cloud/gpu"] = "a100"
    answer = ask(WAITS, kueue.approve(admitted(kueue=kueue))).answer
    assert (
        answer.conflict
        == "admission check capacity sets nodeSelector cloud/gpu=a100 for pods of trainer, another one h100"
    )


def test_readiness_is_told_in_kueues_sequence() -> None:
    one = admitted()
    seen = []
    for run in (RUNS, READY, RUNS, READY, RUNS, READY):
        one = after(run, one)
        assert ask(run, one).write is None, "told once"
        seen.append((condition(one, "PodsReady")["status"], condition(one, "PodsReady")["reason"]))
    assert seen == [
        ("False", "WaitForStart"),
        ("True", "Started"),
        ("False", "WaitForRecovery"),
        ("True", "Recovered"),
        ("False", "WaitForRecovery"),
        ("True", "Recovered"),
    ]


def test_a_status_is_written_whole_and_times_move_with_the_status_alone() -> None:
    one = admitted()
    one["status"]["admissionChecks"] = [{"name": "x", "state": "Ready"}]
    first = after(READY, one)
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
def test_an_evicted_run_stops_and_gives_its_quota_back_when_its_last_pod_is_gone(
    how: str, reason: str, requeued: bool, theirs: str
) -> None:
    one = getattr(KUEUE, how)(after(READY, admitted()))
    while_it_stops = ask(READY, one)
    assert (while_it_stops.answer.stops, while_it_stops.answer.reason) == (True, reason)
    assert while_it_stops.answer.message.endswith(f"({theirs})")
    assert while_it_stops.write is None, "mistake 2: pods are there"
    gone = after(WAITS, one)
    assert "admission" not in gone["status"], "mistake 3: never cleared"
    for kind in ("QuotaReserved", "Admitted", "PodsReady"):
        assert not is_true(gone, kind)
    assert condition(gone, "PodsReady")["reason"] == "WaitForStart"
    assert is_true(gone, "Requeued") == requeued, "mistake 9: no back-off"
    assert condition(gone, "Requeued")["reason"] == theirs.partition("DueTo")[0], "else active again is not enough"
    assert is_true(gone, "Evicted"), "Kueue's to change"
    assert not ask(WAITS, gone).answer.admitted
    assert ask(WAITS, gone).write is None


def test_a_run_that_backs_off_says_until_when() -> None:
    one = after(WAITS, KUEUE.time_out(after(READY, admitted())))
    answer = ask(WAITS, one).answer
    assert answer.reason == "BackingOff"
    assert answer.message.endswith(
        "evicted the run once, because not all pods were ready in time; it retries at 2026-01-01T00:01:00Z"
    )


def test_a_deactivated_workload_says_who_can_do_what() -> None:
    one = after(WAITS, KUEUE.deactivate(after(READY, admitted())))
    answer = ask(WAITS, one).answer
    assert answer.reason == "WorkloadDeactivated"
    assert "DeactivatedDueToRequeuingLimitExceeded" in answer.message
    assert f"set spec.active of Workload {one['metadata']['name']} to true" in answer.message


def test_a_workload_that_is_inactive_admits_nothing_before_kueue_has_evicted_it() -> None:
    one = admitted()
    one["spec"]["active"] = False
    assert ask(WAITS, one) == Step(ask(WAITS, one).answer, None)
    assert not ask(WAITS, one).answer.admitted
    assert ask(READY, one).answer.stops


def test_a_run_that_lost_its_admission_unseen_stops() -> None:
    assert ask(READY, made()).answer.stops


def test_a_workload_deleted_by_hand_is_an_eviction() -> None:
    assert (ask(READY, None).answer.stops, ask(READY, None).write) == (True, None)
    one = admitted()
    one["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    assert (ask(READY, one).answer.stops, ask(READY, one).write) == (True, None)
    assert (ask(WAITS, one).answer.admitted, ask(WAITS, one).write) == (False, None), "its successor has to wait"
    assert isinstance(ask(WAITS, None).write, Create)


# ---- suspension by the user


def test_a_suspended_runs_workload_is_deactivated_when_no_pod_is_left() -> None:
    one = after(READY, admitted())
    assert ask(replace(READY, suspended=True), one).write is None
    rest = replace(WAITS, suspended=True)
    write = ask(rest, one).write
    assert isinstance(write, Edit)
    assert write.patch["spec"] == {"active": False}
    one["spec"]["active"] = False
    one["metadata"]["annotations"] |= write.patch["metadata"]["annotations"]
    assert ask(rest, one).write is None, "until Kueue has evicted it"
    early = ask(WAITS, one)
    assert (early.answer.admitted, early.write) == (False, None), "its quota may be another's by now"
    one = KUEUE.act([one])[0]
    gone = after(rest, one)
    assert "admission" not in gone["status"]
    assert condition(gone, "Requeued")["reason"] == "Deactivated"
    assert ask(rest, gone).write is None
    back = ask(WAITS, gone)
    assert isinstance(back.write, Edit)
    assert back.write.patch == {
        "metadata": {"annotations": {objects.SUSPENDED_ANNOTATION: None}},
        "spec": {"active": True},
    }
    assert not back.answer.admitted


def test_a_run_that_is_made_suspended_has_no_workload() -> None:
    assert ask(replace(WAITS, suspended=True), None).write is None


# ---- the end


@pytest.mark.parametrize("outcome", ["Succeeded", "Failed"])
def test_a_run_that_has_ended_is_finished_when_its_pods_are_gone(outcome: Any) -> None:
    one = after(READY, admitted())
    over = replace(WAITS, over=outcome, outcome="100/100 steps")
    assert ask(replace(over, holds=True), one).write is None
    done = after(over, one)
    assert (condition(done, "Finished")["reason"], is_true(done, "Finished")) == (outcome, True)
    assert ask(over, done).write is None
    assert ask(over, None).write is None, "mistake 10: made again for a finished run"


def test_a_run_that_begins_again_after_its_end_gets_another_workload() -> None:
    done = after(replace(WAITS, over="Failed"), after(READY, admitted()))
    assert isinstance(ask(WAITS, done).write, Remove)
    assert not ask(WAITS, done).answer.admitted


def test_a_workload_that_kueue_finished_itself_stops_its_run() -> None:
    one = after(READY, admitted())
    KUEUE._say(one, "Finished", True, "OutOfSync", "the prebuilt workload is out of sync")
    answer = ask(READY, one).answer
    assert answer.stops, "mistake 5"
    assert "out of sync (OutOfSync)" in answer.message


# ---- shape


def other(run: Subject, count: int) -> Subject:
    sets = tuple({**one, "count": count} if one["name"] == "inference" else one for one in run.pod_sets)
    return replace(run, pod_sets=sets, engines=count)


def test_another_shape_is_written_in_place_while_there_is_no_quota() -> None:
    one = made()
    write = ask(other(WAITS, 4), one).write
    assert isinstance(write, Edit)
    assert write.patch["spec"]["podSets"][1]["count"] == 4
    assert write.patch["metadata"]["annotations"][objects.SHAPE_ANNOTATION] == objects.shape_of(other(WAITS, 4))


def test_a_run_that_outgrows_its_admission_stops_and_asks_anew() -> None:
    one = after(READY, admitted())
    with pytest.raises(RefusedError, match=r"spec.podSets: immutable"):
        judge(one, {**one, "spec": {**one["spec"], "podSets": list(other(WAITS, 4).pod_sets)}})
    answer = ask(other(READY, 4), one).answer
    assert (answer.stops, answer.reason) == (True, "Evicted")
    assert isinstance(ask(other(WAITS, 4), one).write, Remove)


def test_a_run_with_fewer_engines_keeps_its_admission_and_one_with_other_pods_loses_it_with_its_attempt() -> None:
    one = after(READY, admitted())
    between = replace(READY, begins=True)
    assert not ask(other(READY, 1), one).answer.stops
    assert not ask(other(between, 1), one).answer.stops
    assert isinstance(ask(other(WAITS, 1), one).write, Remove), "before it has any pod it asks for what it needs"
    moved = (*SETS[:2], {**SETS[2], "template": {"spec": {"nodeSelector": {"a": "b"}}}})
    assert not ask(replace(READY, pod_sets=moved), one).answer.stops
    assert ask(replace(between, pod_sets=moved), one).answer.stops


def test_another_queue_is_another_shape() -> None:
    write = ask(replace(WAITS, queue="team-b"), made()).write
    assert isinstance(write, Edit)
    assert write.patch["spec"]["queueName"] == "team-b"


def test_an_invalid_specification_neither_asks_for_room_nor_stops_what_runs() -> None:
    assert ask(replace(WAITS, pod_sets=()), None).write is None
    one = after(READY, admitted())
    assert ask(replace(READY, pod_sets=()), one).answer.admitted


# ---- priority


def test_a_priority_is_a_number_with_or_without_its_class() -> None:
    assert objects.made_for(replace(WAITS, priority=Priority(7)))["spec"]["priority"] == 7
    with_class = replace(WAITS, priority=Priority(1000, "kueue.x-k8s.io", "WorkloadPriorityClass", "production"))
    spec = objects.made_for(with_class)["spec"]
    assert (spec["priority"], spec["priorityClassRef"]["name"]) == (1000, "production")
    judge(None, objects.made_for(with_class))


def test_an_edited_priority_reaches_a_workload_that_waits() -> None:
    one = made()
    KUEUE._say(one, "QuotaReserved", False, "WaitingForQuota", "")
    one = after(WAITS, one)
    write = ask(replace(WAITS, priority=Priority(7)), one).write
    assert isinstance(write, Edit)
    assert write.patch["spec"] == {"priority": 7, "priorityClassRef": None}
    assert ask(replace(READY, priority=Priority(7)), after(READY, admitted())).write is None


def test_a_foreign_workload_of_the_name_is_left_alone() -> None:
    one = made(replace(WAITS, uid="uid-2"))
    answer = ask(WAITS, one)
    assert (answer.write, answer.answer.reason) == (None, "QueueUnavailable")
