"""Contents of the status: validity, conditions, heartbeat, checkpoints, kstatus and urgency of its writes."""

from __future__ import annotations

from typing import Any

import pytest

from rlrun.api.run_status import RLRunStatus
from rlrun_operator.status import reasons
from tests.unit.operator.decide.kube import SMALLEST, Kube

INVALID = [
    ({"trainer": {"replicas": 0}}, "spec.trainer.replicas: got 0, expected a whole number from 1 to 4096"),
    ({"orchestrator": {"batchSize": 10}}, "orchestrator.batchSize (10) must be divisible by"),
    ({"storage": {"claimName": "a", "claimTemplate": {}}}, "set only one of claimName (a) and claimTemplate"),
    ({"trainer": {"env": [{"name": "RANK", "value": "1"}]}}, "spec.trainer.env[0]: name (RANK) is reserved"),
    ({"model": {}}, "exactly one of name, path and tiny"),
    (
        {"failurePolicy": {"backoff": {"initialSeconds": 99, "maxSeconds": 9}}},
        "initialSeconds (99) must be at most maxSeconds (9)",
    ),
]


@pytest.mark.parametrize(("blocks", "words"), INVALID)
def test_invalid_spec_creates_nothing_and_reports_the_fix(blocks: dict[str, Any], words: str) -> None:
    kube = Kube(blocks)
    kube.settle()
    assert (kube.status["phase"], list(kube.objects), kube.told) == (
        "Failed",
        [],
        [("Warning", "InvalidConfiguration")],
    )
    valid, stalled = kube.condition("ConfigurationValid"), kube.condition("Stalled")
    assert (valid["status"], stalled["status"], stalled["reason"]) == ("False", "True", "InvalidConfiguration")
    assert words in valid["message"]
    assert words in kube.status["message"]


def test_invalid_fields_are_reported_together_within_bounds() -> None:
    two = Kube({"trainer": {"replicas": 0}, "inference": {"replicas": -1}})
    two.settle()
    assert "spec.trainer.replicas" in two.status["message"]
    assert "spec.inference.replicas" in two.status["message"]
    many = Kube({"environments": [{"id": "x", "groupSize": -i, "ratio": "much"} for i in range(60)]})
    many.settle()
    assert len(many.status["message"]) <= 2000
    assert "more" in many.status["message"]


def test_invalid_run_name_is_refused() -> None:
    kube = Kube()
    kube.run["metadata"]["name"] = "a.b"
    kube.settle()
    assert (kube.status["phase"], list(kube.objects)) == ("Failed", [])
    assert "metadata.name: 'a.b'" in kube.status["message"]


def test_rejected_manifest_is_invalid_and_creates_nothing() -> None:
    kube = Kube()
    kube.rejection = 'StatefulSet "run-trainer" is invalid: spec.template.spec.containers[0].image: Required value'
    kube.settle()
    assert (kube.status["phase"], list(kube.objects)) == ("Failed", [])
    assert "containers[0].image: Required value" in kube.condition("ConfigurationValid")["message"]


def test_new_generation_is_validated_again() -> None:
    kube = Kube({"trainer": {"replicas": 0}})
    kube.settle()
    kube.edit(trainer={"replicas": -1})
    kube.tick()
    assert (kube.status["phase"], kube.status["observedGeneration"]) == ("Failed", 2)
    assert "got -1" in kube.status["message"]
    kube.edit(trainer={"replicas": 1})
    kube.start()
    assert (kube.condition("Failed")["status"], kube.condition("Stalled")["status"]) == ("False", "False")
    assert "completionTime" not in kube.status


def test_invalid_edit_does_not_end_a_running_attempt() -> None:
    kube = Kube().start()
    kube.edit(trainer={"replicas": 0})
    kube.tick()
    valid = kube.condition("ConfigurationValid")
    assert (valid["status"], kube.status["phase"], kube.status["trainerReady"]) == ("False", "Running", "1/1")
    assert "got 0" in valid["message"]
    assert "attempt 1 continues" in valid["message"]
    assert ("Warning", "InvalidConfiguration") in kube.told
    kube.report(50)
    kube.tick()
    assert kube.status["steps"] == "50/100"
    kube.exit("trainer", 1)
    kube.tick()
    kube.tick()
    assert (kube.status["phase"], kube.condition("Failed")["reason"]) == ("Failed", "InvalidConfiguration")
    kube.edit(trainer={"replicas": 2})
    kube.tick()
    kube.tick()
    kube.tick()
    assert (kube.status["phase"], kube.status["attempt"], kube.status["trainerReady"]) == ("Starting", 2, "2/2")


def test_unknown_fields_are_ignored_and_reported() -> None:
    kube = Kube({"task": "RL", "trainer": {"replicas": 1, "warpDrive": True}})
    kube.settle()
    condition = kube.condition("ConfigurationValid")
    assert (condition["status"], condition["reason"], kube.status["phase"]) == ("True", "FieldsIgnored", "Starting")
    assert "spec.trainer.warpDrive" in condition["message"]


def test_lost_heartbeat_is_reported_without_a_failure() -> None:
    kube = Kube().start()
    assert kube.decide().wake_in == pytest.approx(59)
    kube.tick(61)
    condition = kube.condition("Progressing")
    assert (condition["status"], condition["reason"], kube.status["phase"]) == ("Unknown", "HeartbeatLost", "Running")
    kube.tick(10_000)
    assert (kube.status["attempt"], kube.status["phase"]) == (1, "Running")
    kube.report(4)
    kube.tick()
    assert [reason for _, reason in kube.told][-2:] == ["HeartbeatLost", "HeartbeatResumed"]


def test_restarted_operator_reports_no_lost_heartbeat() -> None:
    kube = Kube().start()
    kube.lease_changed_at = None
    kube.tick(1000)
    assert kube.condition("Progressing")["reason"] == "Training"


@pytest.mark.parametrize(
    ("spec", "step", "saved", "status", "reason"),
    [
        ({}, 10, None, "Unknown", "NoCheckpointYet"),
        ({}, 25, 20, "True", "CheckpointsComplete"),
        ({}, 61, None, "False", "CheckpointsOverdue"),
        ({}, 95, 20, "False", "CheckpointsOverdue"),
        ({"checkpoint": {"enabled": False}}, 95, None, "Unknown", "CheckpointsOff"),
    ],
)
def test_checkpoint_condition_follows_reports(
    spec: dict[str, Any], step: int, saved: int | None, status: str, reason: str
) -> None:
    kube = Kube(spec).start(step=1)
    kube.report(step, checkpoint_step=saved)
    kube.tick()
    condition = kube.condition("CheckpointHealthy")
    assert (condition["status"], condition["reason"]) == (status, reason)
    assert kube.status["checkpoint"].get("latestCompleteStep") == saved


FULL = "StorageFull: the volume is full: 12 MiB free of 10 GiB; cannot save a checkpoint since 10:00:00 UTC"


def test_storage_problem_is_reported_with_lost_steps_until_solved() -> None:
    kube = Kube().start(step=1)
    kube.report(47, checkpoint_step=40, storage=FULL)
    kube.tick()
    ready, healthy = kube.condition("StorageReady"), kube.condition("CheckpointHealthy")
    assert [(c["status"], c["reason"]) for c in (ready, healthy)] == [("False", "StorageFull")] * 2
    assert ready["message"].startswith(
        "claim run-data: the volume is full: 12 MiB free of 10 GiB; cannot save a checkp"
    )
    assert "make space on it, or enlarge the claim: the run continues by itself" in ready["message"]
    assert healthy["message"].endswith("a restart now would lose 7 steps, those since step 40")
    assert (kube.status["phase"], kube.status["reason"], kube.status["attempt"]) == ("Running", "StorageFull", 1)
    assert kube.told.count(("Warning", "StorageFull")) == 1
    assert kube.decide().look_up == frozenset(), "events of Kubernetes do not explain it"
    kube.report(48, checkpoint_step=48)
    kube.tick()
    assert kube.condition("StorageReady")["reason"] == "ClaimBound"
    assert kube.condition("CheckpointHealthy")["reason"] == "CheckpointsComplete"
    kube.report(49, checkpoint_step=48, storage="Nonsense: of a role that knows more")
    kube.tick()
    assert kube.condition("StorageReady")["reason"] == "ClaimBound"


def test_progress_is_read_from_lease_without_invalid_values() -> None:
    kube = Kube().start(step=1)
    kube.report(
        42,
        policy_version=41,
        reward="0.6180339887",
        tokens_per_second="12345.678",
        staleness_mean="nan",
        eta_seconds=58,
    )
    kube.tick()
    progress = kube.status["progress"]
    assert (progress["step"], progress["percent"], progress["policyVersion"]) == (42, 42, 41)
    assert (progress["reward"], progress["tokensPerSecond"], "stalenessMean" in progress) == (0.618, 12350.0, False)
    assert progress["estimatedCompletionTime"] == "2023-11-14T22:14:21Z"
    assert kube.status["inference"]["weightVersion"] == 41
    kube.report(None)
    kube.objects[next(r for r in kube.objects if r.kind == "Lease")]["metadata"]["annotations"]["rlrun.io/step"] = (
        "many"
    )
    kube.tick()
    assert kube.status["progress"]["step"] == 42


def test_status_urgency_follows_the_change() -> None:
    kube = Kube().start()
    kube.report(4)
    assert kube.decide().urgency == "progress"
    kube.tick()
    kube.pod("inference")["status"]["conditions"] = [{"type": "Ready", "status": "False"}]
    assert kube.decide().urgency == "soon"
    kube.exit("trainer", 1)
    assert kube.decide().urgency == "now"


def test_transition_time_changes_only_with_condition_status() -> None:
    kube = Kube().start()
    before = {c["type"]: c["lastTransitionTime"] for c in kube.status["conditions"]}
    kube.edit(maxSteps=200)
    kube.tick(10)
    after = {c["type"]: c["lastTransitionTime"] for c in kube.status["conditions"]}
    assert (after, kube.condition("ConfigurationValid")["reason"]) == (before, "ChangePending")
    assert {c["observedGeneration"] for c in kube.status["conditions"]} == {2}


@pytest.mark.parametrize("phase", ["Starting", "Running", "Restarting", "Completing", "Complete", "Failed"])
def test_kstatus_conditions_follow_the_phase(phase: str) -> None:
    kube = Kube()
    kube.settle()
    if phase != "Starting":
        kube.start()
    if phase in ("Completing", "Complete"):
        kube.exit("orchestrator", 0)
    if phase in ("Restarting", "Failed"):
        kube.exit("orchestrator", 78 if phase == "Failed" else 1)
    kube.do(kube.decide()) if phase in ("Restarting", "Completing") else kube.tick()
    kube.tick() if phase == "Complete" else None
    assert kube.status["phase"] == phase
    reconciling, stalled = kube.condition("Reconciling")["status"], kube.condition("Stalled")["status"]
    busy = phase in ("Starting", "Restarting", "Completing")
    assert (reconciling, stalled) == ("True" if busy else "False", "True" if phase == "Failed" else "False")
    assert (kube.condition("Complete").get("status") == "True") == (phase == "Complete")


def test_status_is_valid_in_the_schema() -> None:
    kube = Kube().start()
    kube.exit("trainer", 1)
    kube.tick()
    RLRunStatus.model_validate(kube.status, strict=True)
    assert {c["type"] for c in kube.status["conditions"]} <= set(reasons.CONDITION_TYPES)
    assert {c["reason"] for c in kube.status["conditions"]} <= set(reasons.CONDITION_REASONS)
    assert {reason for _, reason in kube.told} <= set(reasons.EVENT_REASONS)
    assert SMALLEST["model"]
