"""Guest run on one machine: it finds its host's addresses and starts only its orchestrator."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rlrun.api.resolve import resolve_spec
from rlrun.api.resource import RLRunSpec
from rlrun.config.models.run_config import RunConfig
from rlrun.local.preflight import PreflightError
from rlrun.local.process_plan import Ports, plan_processes, with_endpoints
from rlrun.local.shared_processes import endpoints_of, join_host, offer_trainer, shares_trainer, withdraw_offer
from rlrun.protocol.files.paths import RunPaths

PORTS = Ports(trainer=1001, rendezvous=1002, metrics=1003, inference=(1004, 1005))
GUEST_PORTS = Ports(trainer=2001, rendezvous=2002, metrics=2003, inference=())


def make_config(root: Path, name: str, **trainer: object) -> RunConfig:
    document = {"model": {"tiny": {}}, "environments": [{"id": "arithmetic"}], "trainer": trainer}
    return resolve_spec(RLRunSpec.model_validate(document), name=name, uid="u", output_dir=str(root / name))


def test_guest_gets_addresses_of_host(tmp_path: Path) -> None:
    host, guest = (
        make_config(tmp_path, "host", lora={"slots": 2}),
        make_config(tmp_path, "guest", lora={}, sharedWith="host"),
    )
    assert (shares_trainer(host), shares_trainer(guest)) == (True, False)
    paths = RunPaths(tmp_path / "host")
    offer_trainer(paths, PORTS)
    (file,) = paths.shared.iterdir()
    assert "key" not in file.read_text(), "a guest has its own"
    endpoints = endpoints_of(tmp_path / "guest", "host")
    (placed,) = [join_host(one, endpoints) for one in with_endpoints(guest, GUEST_PORTS, replay=None)]
    assert placed.orchestrator.trainer_url == "http://127.0.0.1:1001"
    assert placed.orchestrator.inference_urls == ["http://127.0.0.1:1004", "http://127.0.0.1:1005"]
    assert placed.orchestrator.metrics_port == 2003
    (only,) = plan_processes(
        [placed],
        [tmp_path / "run.json"],
        attempt=1,
        api_key="own-key",
        launch_id="id",
        ports=GUEST_PORTS,
        trainer_gpus=[],
        inference_gpus=[],
    )
    assert (only.role, only.environment["RLRUN_API_KEY"]) == ("orchestrator", "own-key")
    withdraw_offer(paths)
    with pytest.raises(PreflightError, match=r"sharedWith \(host\): no run .* start it first"):
        endpoints_of(tmp_path / "guest", "host")


def test_host_with_killed_launcher_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: child)
        offer_trainer(RunPaths(tmp_path / "host"), PORTS)
    with pytest.raises(PreflightError, match="start it first"):
        endpoints_of(tmp_path / "guest", "host")
