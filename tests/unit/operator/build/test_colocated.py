"""Children of a run whose engines are in the trainer's pods (`placement.colocate`)."""

from __future__ import annotations

from typing import Any

import pytest

from rlrun.config.loading.loader import load_file
from rlrun.config.models.run_config import RunConfig
from rlrun_operator.names import ROLE_LABEL, RUN_LABEL
from rlrun_operator.render import RunContext, render_workloads
from tests.unit.operator.build.examples import SETTINGS, context, everything, find_child

COLOCATED: dict[str, Any] = {
    "algorithm": {"maxAsyncLevel": 0},
    "placement": {"colocate": True},
    "trainer": {"replicas": 2, "gpusPerReplica": 1},
    "inference": {"gpusPerReplica": 1},
}


def trainer_container(ctx: RunContext) -> dict[str, Any]:
    made = render_workloads(ctx).trainer
    assert made is not None
    (found,) = made["spec"]["template"]["spec"]["containers"]
    return dict(found)


def test_colocated_container_has_gpus_once_and_no_liveness_probe() -> None:
    ctx = context(COLOCATED)
    made = render_workloads(ctx)
    assert made.inference is None
    both = trainer_container(ctx)
    assert both["name"] == "trainer"
    assert both["image"] == SETTINGS.images["inference"]
    assert both["resources"]["limits"] == {"nvidia.com/gpu": "1"}
    assert {port["name"]: port["containerPort"] for port in both["ports"]} == {
        "channel": 29600,
        "rendezvous": 29500,
        "health": 29601,
        "http": 8000,
    }
    assert "livenessProbe" not in both, "an engine that sleeps, or a trainer that computes, is no reason to end both"
    own = context(COLOCATED | {"trainer": COLOCATED["trainer"] | {"image": "mine"}})
    assert trainer_container(own)["image"] == "mine"


def test_colocated_engine_service_selects_trainer_pods(tmp_path: Any) -> None:
    ctx = context(COLOCATED)
    services = {m["metadata"]["name"]: m["spec"] for m in everything(ctx) if m["kind"] == "Service"}
    assert services["run-inference"]["selector"] == {RUN_LABEL: "run", ROLE_LABEL: "trainer"}
    assert services["run-inference"]["publishNotReadyAddresses"] is True
    assert [port["port"] for port in services["run-inference"]["ports"]] == [8000]
    file = tmp_path / "run.json"
    file.write_text(find_child(ctx, "ConfigMap")["data"]["run.json"])
    config = load_file(RunConfig, file)
    assert config.orchestrator.inference_service == "http://run-inference.team-a.svc.cluster.local:8000"
    assert config.trainer.engine_urls == ["http://127.0.0.1:8000"]
    assert config.inference is not None
    assert (config.inference.replicas, config.inference.host) == (2, "0.0.0.0")


@pytest.mark.parametrize("blocks", [None, {"inference": {"replicas": 2}}])
def test_run_without_colocation_has_its_own_engines(blocks: dict[str, Any] | None) -> None:
    ctx = context(blocks)
    assert render_workloads(ctx).inference is not None
    assert trainer_container(ctx)["image"] == SETTINGS.images["trainer"]
    services = {m["metadata"]["name"]: m["spec"]["selector"] for m in everything(ctx) if m["kind"] == "Service"}
    assert services["run-inference"][ROLE_LABEL] == "inference"
