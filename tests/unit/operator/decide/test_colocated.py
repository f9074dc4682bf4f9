"""Run with colocated engines: no Deployment and no engine conditions."""

from __future__ import annotations

from typing import Any

from tests.unit.operator.decide.kube import Kube

COLOCATED: dict[str, Any] = {"algorithm": {"maxAsyncLevel": 0}, "placement": {"colocate": True}}


def list_condition_types(kube: Kube) -> set[str]:
    return {condition["type"] for condition in kube.status["conditions"]}


def test_colocated_run_restarts_without_a_deployment() -> None:
    kube = Kube(COLOCATED)
    first = kube.decide()
    assert [a.manifest["kind"] for a in first.apply][-2:] == ["StatefulSet", "Pod"]
    services = [a.manifest["metadata"]["name"] for a in first.apply if a.manifest["kind"] == "Service"]
    assert sorted(services) == ["run-inference", "run-trainer"]
    kube.start()
    assert ("Normal", "Training") in kube.told
    assert "InferenceAvailable" not in list_condition_types(kube)
    assert kube.condition("Scheduled")["status"] == "True"
    kube.exit("trainer", 1)
    for _ in range(60):
        kube.tick()
    assert (kube.status["attempt"], kube.status["restarts"]) == (2, 1)
    assert not [ref for ref in kube.objects if ref.kind == "Deployment"]
    before = len(kube.writes)
    assert not kube.do(kube.decide()), kube.writes[before:]
