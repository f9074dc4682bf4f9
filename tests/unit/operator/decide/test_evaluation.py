"""Run of task Eval: no trainer, answers as steps, and results in the status."""

from __future__ import annotations

from typing import Any

import pytest

from rlrun.protocol.messages import lease_annotations as keys
from rlrun.runtime import exit_codes
from rlrun_operator.names import Ref
from rlrun_operator.times import format_rfc3339
from tests.unit.operator.decide.kube import Kube

EVAL: dict[str, Any] = {"task": "Eval", "policies": {"fromRun": "taught"}}
MEASURED = "reverse-text, base: avg@1 0.0500\nreverse-text, step 10: avg@1 0.6000"


def list_condition_types(kube: Kube) -> set[str]:
    return {condition["type"] for condition in kube.status["conditions"]}


def start_evaluation() -> Kube:
    """Evaluation with half of its answers."""
    kube = Kube(EVAL)
    kube.settle()
    kube.tick()
    kube.tick()
    kube.report(0, total_steps=12)
    kube.report(6, total_steps=12)
    return kube


def report_results(kube: Kube) -> None:
    kube.objects[Ref("Lease", "run-progress")]["metadata"]["annotations"][keys.RESULTS] = MEASURED


def test_evaluation_completes_without_a_trainer() -> None:
    kube = Kube(EVAL)
    first = kube.decide()
    assert [a.manifest["kind"] for a in first.apply][-2:] == ["Deployment", "Pod"]
    assert [a.manifest["metadata"]["name"] for a in first.apply if a.manifest["kind"] == "Service"] == ["run-inference"]
    kube.settle()
    for _ in range(3):
        kube.tick()
    assert (kube.status["launchedAttempt"], kube.status["trainerReady"], kube.status["steps"]) == (1, "0/0", "0/0")
    assert kube.condition("PodsReady")["message"] == "the orchestrator is ready"
    assert kube.status["phase"] == "Starting"
    assert "CheckpointHealthy" not in list_condition_types(kube)
    kube.report(0, total_steps=128)
    kube.tick()
    assert (kube.status["phase"], kube.status["steps"]) == ("Starting", "0/128"), "no answer is there"
    kube.report(96, total_steps=128)
    kube.tick()
    assert (kube.status["phase"], kube.status["steps"], kube.status["progress"]["percent"]) == ("Running", "96/128", 75)
    assert kube.condition("Progressing")["reason"] == "Answering"
    assert "attempt 1: 1 engine and the orchestrator" in kube.messages
    kube.report(128, total_steps=128)
    report_results(kube)
    kube.exit("orchestrator", 0)
    for _ in range(3):
        kube.tick()
    assert (kube.status["phase"], kube.status["steps"]) == ("Complete", "128/128")
    assert kube.status["results"] == MEASURED.splitlines()
    assert kube.condition("Complete")["message"] == "every policy is measured"
    assert not kube.pods("inference"), "a complete run holds no GPU"
    assert kube.status["checkpoint"]["stepsLostTotal"] == 0
    assert kube.told == [
        ("Normal", "AttemptStarted"),
        ("Normal", "EnginesAvailable"),
        ("Normal", "Answering"),
        ("Normal", "Completed"),
    ]


def test_killed_orchestrator_restarts_without_losing_answers() -> None:
    kube = start_evaluation()
    engine = kube.pod("inference")["metadata"]["uid"]
    report_results(kube)
    kube.exit("orchestrator", 137)
    for _ in range(60):
        kube.tick()
    assert (kube.status["attempt"], kube.status["restartsCountedTowardsMax"]) == (2, 1)
    assert kube.pod("inference")["metadata"]["uid"] == engine, "engines outlive attempts"
    assert kube.status["steps"] == "6/12"
    assert kube.status["results"] == MEASURED.splitlines(), "what was measured stays known"
    kube.report(6, total_steps=12, resumed=6)
    kube.tick()
    assert kube.status["checkpoint"]["stepsLostTotal"] == 0
    assert "attempt 2 found 6 answers and requests the rest" in kube.messages
    before = len(kube.writes)
    assert not kube.do(kube.decide()), kube.writes[before:]


def test_invalid_evaluation_fails_immediately() -> None:
    kube = start_evaluation()
    kube.exit("orchestrator", exit_codes.DATA, message="policies.fromRun (taught): there is no folder /data/taught")
    for _ in range(3):
        kube.tick()
    assert (kube.status["phase"], kube.status["attempt"]) == ("Failed", 1)
    assert "policies.fromRun (taught)" in kube.condition("Failed")["message"]
    assert not kube.pods("inference")


def test_resumed_evaluation_requests_missing_answers() -> None:
    kube = start_evaluation()
    kube.edit(suspend=True)
    for _ in range(90):
        kube.tick()
    assert kube.status["phase"] == "Suspended", kube.status
    assert not kube.pods("inference")
    assert "it requests the missing answers (6/12), when" in kube.condition("Suspended")["message"]
    kube.edit(suspend=False)
    for _ in range(5):
        kube.tick()
    assert (kube.status["attempt"], kube.status["restarts"]) == (2, 0)
    kube.report(7, total_steps=12, resumed=6)
    kube.tick()
    assert (kube.status["phase"], kube.status["steps"]) == ("Running", "7/12")


def test_hanging_evaluation_is_restarted() -> None:
    kube = start_evaluation()
    kube.tick()
    kube.hang(2000, 6, total_steps=12)
    assert kube.status["failures"][0]["reason"] == "NoProgress"
    assert "no answer is done" in kube.status["failures"][0]["message"]
    assert kube.status["attempt"] > 1


def test_single_node_volume_puts_evaluation_on_engine_node() -> None:
    one_node = {"storage": {"claimTemplate": {"size": "1Gi", "accessModes": ["ReadWriteOnce"]}}}
    kube = Kube(EVAL | one_node)
    workloads = [a.manifest for a in kube.decide().apply if a.manifest["kind"] in ("Deployment", "Pod")]
    assert len(workloads) == 2
    for child in workloads:
        spec = child["spec"]["template"]["spec"] if child["kind"] == "Deployment" else child["spec"]
        (term,) = spec["affinity"]["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        assert term["labelSelector"]["matchLabels"]["rlrun.io/role"] == "inference"


@pytest.mark.parametrize(
    ("tiny", "container"), [({}, "model"), ({"warmupEnvironment": "reverse-text"}, "demonstrations")]
)
def test_orchestrator_makes_the_tiny_model_and_reports_a_failure(tiny: dict[str, str], container: str) -> None:
    kube = Kube(EVAL | {"model": {"tiny": tiny}})
    pod = next(a.manifest for a in kube.decide().apply if a.manifest["kind"] == "Pod")
    made = ["demonstrations", "model"] if tiny else ["model"]
    assert [c["name"] for c in pod["spec"]["initContainers"]] == ["folder", *made, "environments"]
    kube.make_ready = False
    kube.settle()
    kube.tick()
    status = kube.pod("orchestrator")["status"]
    status["initContainerStatuses"] = [{"name": container, "restartCount": 0, "state": {"running": {}}}]
    kube.tick()
    assert kube.condition("PodsReady")["message"] == "orchestrator: the init container is creating the tiny model"
    end = {
        "exitCode": 74,
        "reason": "Error",
        "message": "cannot write to /data/run",
        "finishedAt": format_rfc3339(kube.now),
    }
    status = kube.pod("orchestrator")["status"]
    status |= {"phase": "Failed"}
    status["initContainerStatuses"] = [{"name": container, "restartCount": 0, "state": {"terminated": end}}]
    kube.tick()
    assert kube.status["lastFailure"]["message"] == "cannot write to /data/run"
    assert kube.status["lastFailure"]["exitCode"] == 74
