"""Life of a run without failures: creation order, number of writes, and recovery from crashes of the operator."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from rlrun_operator.names import Ref
from rlrun_operator.state import Scale
from tests.unit.operator.decide.kube import EPOCH, NAME, Kube

SPEC = {"trainer": {"replicas": 2}, "inference": {"replicas": 3, "minAvailable": 2}}
STATEFULSET, DEPLOYMENT = Ref("StatefulSet", "run-trainer"), Ref("Deployment", "run-inference")
BUDGET = Ref("PodDisruptionBudget", "run-inference")


@pytest.mark.parametrize(
    ("role", "kind"), [("trainer", "StatefulSet"), ("inference", "Deployment"), ("orchestrator", "Pod")]
)
@pytest.mark.parametrize(
    "block",
    [
        {"podTemplate": {"spec": {"nodeSelector": {"zone": "a"}}}},
        {"affinity": {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}}},
        {"resources": {"limits": {"example.com/rdma": 1}}},
    ],
    ids=["podTemplate", "affinity", "extended resource"],
)
def test_fields_judged_only_by_api_server_are_dry_run(role: str, kind: str, block: dict[str, Any]) -> None:
    first = Kube({**SPEC, role: {**SPEC.get(role, {}), **block}}).decide()
    assert [child["kind"] for child in first.dry_run] == [kind]


def test_first_pass_creates_everything() -> None:
    first = Kube(SPEC).decide()
    assert first.dry_run == ()
    assert {child["kind"] for child in first.create} == {"PersistentVolumeClaim", "Lease", "Secret"}
    assert [(a.manifest["kind"], a.expect_absent) for a in first.apply][-3:] == [
        ("StatefulSet", True),
        ("Deployment", True),
        ("Pod", True),
    ]
    assert (first.status["phase"], first.status["attempt"], first.urgency) == ("Starting", 1, "now")
    assert "launchedAttempt" not in first.status or first.status["launchedAttempt"] == 0


def test_run_goes_from_creation_to_complete() -> None:
    kube = Kube(SPEC)
    kube.settle()
    assert (kube.status["phase"], kube.status["launchedAttempt"], kube.status["trainerReady"]) == ("Starting", 1, "2/2")
    kube.tick()
    kube.report(0)
    kube.tick()
    assert kube.status["phase"] == "Starting"  # only a step of this attempt leads to Running
    kube.report(1, reward=0.123456)
    kube.tick()
    assert (kube.status["phase"], kube.status["steps"], kube.status["progress"]["reward"]) == (
        "Running",
        "1/100",
        0.1235,
    )
    kube.report(100)
    kube.exit("orchestrator", 0)
    kube.do(kube.decide())
    assert (kube.status["phase"], [ref for ref in kube.objects if ref in (STATEFULSET, DEPLOYMENT)]) == (
        "Completing",
        [],
    )
    kube.tick()
    assert (kube.status["phase"], kube.status["steps"]) == ("Complete", "100/100")
    assert kube.status["completionTime"]
    assert not kube.pods("trainer")
    assert not kube.pods("inference")
    assert kube.pods("orchestrator"), "the orchestrator's pod stays for its log"


def test_orchestrator_pod_is_kept_while_its_sidecars_end() -> None:
    """The kubelet stops sidecars after the orchestrator; until then the pod's phase is Running."""
    kube = Kube().start()
    kube.report(100)
    kube.exit("orchestrator", 0)
    kube.pod("orchestrator")["status"]["phase"] = "Running"
    kube.tick(3)
    assert kube.status["phase"] == "Complete"
    assert kube.pods("orchestrator")


def test_start_of_a_run_costs_few_writes_and_events() -> None:
    kube = Kube(SPEC).start()
    assert len(kube.writes) + len(kube.told) <= 23, kube.writes
    assert kube.told == [("Normal", "AttemptStarted"), ("Normal", "EnginesAvailable"), ("Normal", "Training")]


def test_unchanged_run_writes_nothing() -> None:
    kube = Kube(SPEC).start()
    for seconds in (1.0, 10.0, 30.0):
        kube.now += seconds
        before = len(kube.writes)
        assert not kube.do(kube.decide()), kube.writes[before:]


@pytest.mark.parametrize("stop_after", range(16))
def test_operator_crash_during_start_is_recovered(stop_after: int) -> None:
    kube = Kube(SPEC)
    kube.do(kube.decide(), stop_after=stop_after)
    kube.controllers()
    kube.start()
    assert (kube.status["attempt"], kube.status["restarts"]) == (1, 0)
    assert kube.applied == [("StatefulSet", 1), ("Pod", 1)]
    assert kube.told.count(("Normal", "AttemptStarted")) == 1


def test_lagging_cache_creates_nothing_twice() -> None:
    kube = Kube(SPEC)
    kube.do(kube.decide())
    behind = frozenset({"workloads", "pods", "lease"})
    for _ in range(3):
        again = kube.decide(lag=behind)
        assert not again.create
        assert [(a.manifest["kind"], a.expect_absent) for a in again.apply] == [
            ("StatefulSet", True),
            ("Deployment", True),
            ("Pod", True),
        ]
        kube.do(again)
    assert kube.applied == [("StatefulSet", 1), ("Pod", 1)]
    assert kube.status["launchedAttempt"] == 0


def test_engine_count_edit_scales_only_the_engines() -> None:
    kube = Kube(SPEC).start()
    before = copy.deepcopy(kube.objects)
    kube.edit(inference={"replicas": 5, "minAvailable": 2})
    decision = kube.decide()
    assert (decision.scale, decision.delete) == ((Scale(DEPLOYMENT, kube.uid(DEPLOYMENT), 5),), ())
    assert [apply.manifest["kind"] for apply in decision.apply] == ["PodDisruptionBudget"]
    kube.tick()
    assert (kube.status["inferenceReady"], kube.status["phase"], len(kube.pods("inference"))) == ("5/5", "Running", 5)
    assert ("Normal", "InferenceScaled") in kube.told
    assert all(kube.objects[ref] == before[ref] for ref in before if ref not in (DEPLOYMENT, BUDGET))


def test_min_available_edit_changes_only_status_and_budget() -> None:
    kube = Kube(SPEC).start()
    kube.edit(inference={"replicas": 3, "minAvailable": 3})
    decision = kube.decide()
    assert (decision.scale, decision.delete, decision.urgency) == ((), (), "now")
    assert [apply.manifest["kind"] for apply in decision.apply] == ["PodDisruptionBudget"]
    assert kube.status["observedGeneration"] == 1
    kube.tick()
    assert kube.status["observedGeneration"] == 2


def test_other_edits_wait_for_the_next_attempt() -> None:
    kube = Kube(SPEC).start()
    before = copy.deepcopy(kube.objects)
    kube.edit(trainer={"replicas": 4})
    kube.tick()
    assert kube.condition("ConfigurationValid")["reason"] == "ChangePending"
    assert (kube.objects, kube.status["trainerReady"], kube.status["phase"]) == (before, "2/2", "Running")
    kube.exit("trainer", 1)
    kube.tick()
    kube.tick()
    assert (kube.status["attempt"], kube.status["trainerReady"]) == (2, "4/4")
    assert kube.condition("ConfigurationValid")["reason"] == "Valid"


def test_edit_during_creation_starts_another_attempt() -> None:
    kube = Kube(SPEC)
    twelfth = [a.manifest["kind"] for a in kube.decide().apply].index("StatefulSet") + len(kube.decide().create) + 1
    kube.do(kube.decide(), stop_after=twelfth)
    kube.controllers()
    assert kube.attempts_of_trainers() == {"1"}
    kube.edit(trainer={"replicas": 1})
    kube.start()
    assert (kube.status["attempt"], len(kube.pods("trainer")), kube.status["restartsCountedTowardsMax"]) == (2, 1, 0)
    assert kube.attempts_of_trainers() == {"2"}


def test_deleted_deployment_is_recreated_without_a_restart() -> None:
    kube = Kube(SPEC).start()
    kube.delete(DEPLOYMENT)
    kube.tick()
    kube.tick()
    assert (kube.status["phase"], kube.status["attempt"], kube.status["inferenceReady"]) == ("Running", 1, "3/3")


def test_missing_engines_never_fail_a_run() -> None:
    kube = Kube(SPEC).start()
    kube.make_ready = False
    for i in range(2):
        kube.delete(kube.ref("inference", i))
    kube.tick()
    assert (kube.status["phase"], kube.status["attempt"]) == ("Running", 1)
    assert kube.condition("InferenceAvailable")["status"] == "False"
    assert ("Warning", "EnginesUnavailable") in kube.told


def test_new_run_waits_for_deletion_of_its_predecessor() -> None:
    old = Kube(SPEC).start()
    kube = Kube(SPEC)
    kube.now = old.now + 10
    kube.run["metadata"] |= {"uid": "another", "creationTimestamp": "2023-11-14T22:13:30Z"}
    kube.objects = {ref: o for ref, o in old.objects.items() if ref.kind in ("Pod", "StatefulSet", "Lease")}
    kube.make_ready = False
    decision = kube.decide()
    assert (decision.create, decision.apply, decision.status["phase"]) == ((), (), "Pending")
    assert "StatefulSet run-trainer" in decision.status["message"]
    kube.objects.clear()
    kube.tick()
    assert (kube.status["phase"], kube.status["attempt"]) == ("Starting", 1)


def test_run_under_deletion_is_unchanged() -> None:
    kube = Kube(SPEC).start()
    kube.run["metadata"]["deletionTimestamp"] = "2023-11-14T22:14:00Z"
    kube.delete(kube.ref("trainer"))
    decision = kube.decide()
    assert (decision.apply, decision.delete, decision.scale, decision.status) == ((), (), (), kube.status)


def _complete(kube: Kube) -> None:
    kube.exit("orchestrator", 0)


def _fail(kube: Kube) -> None:
    kube.exit("orchestrator", 78)


@pytest.mark.parametrize(("end", "phase"), [(_complete, "Complete"), (_fail, "Failed")])
def test_terminal_phase_ignores_edits(end: Callable[[Kube], None], phase: str) -> None:
    kube = Kube(SPEC).start()
    end(kube)
    kube.tick()
    kube.tick()
    assert (kube.status["phase"], STATEFULSET in kube.objects, DEPLOYMENT in kube.objects) == (phase, False, False)
    kube.edit(seed=7)
    kube.delete(kube.ref("orchestrator"))
    kube.tick(100)
    assert (kube.status["phase"], kube.pods("trainer")) == (phase, [])


def test_unreadable_status_leaves_the_run_unchanged() -> None:
    kube = Kube(SPEC).start()
    before = copy.deepcopy(kube.objects)
    kube.run["status"] |= {"invented": 1, "progress": {"step": "many", "speed": 3}}
    kube.tick()
    assert (kube.objects, kube.status["phase"], kube.status["attempt"]) == (before, "Running", 1)
    assert "invented" not in kube.status


def test_times_are_utc_in_whole_seconds() -> None:
    kube = Kube()
    kube.now = EPOCH + 0.9
    kube.settle()
    assert kube.status["startTime"] == "2023-11-14T22:13:20Z"
    assert NAME in kube.status["storage"]["path"]
