"""Supervised run (task SFT): no engines and no engine conditions."""

from __future__ import annotations

from typing import Any

from tests.unit.operator.decide.kube import Kube

SFT: dict[str, Any] = {
    "task": "SFT",
    "environments": [],
    "data": {"sources": [{"path": "/data/chats.jsonl"}], "epochs": 1},
}


def list_condition_types(kube: Kube) -> set[str]:
    return {condition["type"] for condition in kube.status["conditions"]}


def test_supervised_run_completes_without_engines() -> None:
    kube = Kube(SFT)
    first = kube.decide()
    assert [a.manifest["kind"] for a in first.apply][-2:] == ["StatefulSet", "Pod"]
    assert [a.manifest["metadata"]["name"] for a in first.apply if a.manifest["kind"] == "Service"] == ["run-trainer"]
    kube.start()
    assert kube.told == [("Normal", "AttemptStarted"), ("Normal", "Training")]
    assert "1 trainer pod and the orchestrator" in " ".join(kube.messages)
    assert "InferenceAvailable" not in list_condition_types(kube)
    assert (kube.status["inferenceReady"], kube.status["launchedAttempt"]) == ("0/0", 1)
    assert kube.condition("Scheduled")["status"] == "True"
    # The data ends before maxSteps, and the status contains the actual total.
    kube.report(40, total_steps=40)
    kube.exit("orchestrator", 0)
    kube.tick()
    kube.tick()
    assert (kube.status["phase"], kube.status["steps"], kube.status["progress"]["percent"]) == (
        "Complete",
        "40/40",
        100,
    )
    assert "InferenceAvailable" not in list_condition_types(kube)
    assert not kube.pods("trainer")


def test_failed_trainer_restarts_supervised_run_without_engines() -> None:
    kube = Kube(SFT).start()
    kube.exit("trainer", 1)
    for _ in range(60):
        kube.tick()
    assert (kube.status["attempt"], kube.status["restarts"]) == (2, 1)
    assert not [ref for ref in kube.objects if ref.kind == "Deployment"]
    assert "InferenceAvailable" not in list_condition_types(kube)
    before = len(kube.writes)
    assert not kube.do(kube.decide()), kube.writes[before:]
