"""`kubectl describe` of a run that cannot start: cause, role and fix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.e2e.cluster.kube_run import KubeRun

Manifest = Callable[..., dict[str, Any]]
NewRun = Callable[[dict[str, Any]], KubeRun]

pytestmark = [pytest.mark.full, pytest.mark.timeout(300)]


def _check_explained(run: KubeRun, *words: str) -> str:
    run.apply()

    def found() -> str | None:
        # The manifest does not count: the operator writes only status and events.
        text = run.kubectl("describe", "rlr", run.name).partition("\nStatus:")[2]
        return text if all(word in text for word in words) else None

    text: str = run.wait(f"describe says {', '.join(words)}", found)
    return text


def test_missing_gpu_node_is_reported(new_run: NewRun, stub_manifest: Manifest) -> None:
    run = new_run(stub_manifest("no-gpu", trainer={"gpusPerReplica": 8}))
    _check_explained(run, "trainer needs", "8 nvidia.com/gpu")
    assert run.status()["phase"] == "Starting"
    assert run.condition("Scheduled")["status"] == "False"


def test_wrong_node_label_is_reported(new_run: NewRun, stub_manifest: Manifest) -> None:
    run = new_run(stub_manifest("wrong-label", inference={"nodeSelector": {"disk": "fast"}}))
    _check_explained(run, "inference needs", "disk=fast")
    assert run.condition("Scheduled")["status"] == "False"


def test_unbound_claim_is_reported_on_cluster(new_run: NewRun, stub_manifest: Manifest) -> None:
    run = new_run(stub_manifest("no-volume", storage={"claimTemplate": {"storageClassName": "broken", "size": "1Gi"}}))
    _check_explained(run, "no-volume-data", "broken")
    assert run.condition("StorageReady")["status"] == "False"


def test_missing_storage_class_is_reported(new_run: NewRun, stub_manifest: Manifest) -> None:
    run = new_run(stub_manifest("no-class", storage={"claimTemplate": {"storageClassName": "nowhere", "size": "1Gi"}}))
    _check_explained(run, "no-class-data", "nowhere")
    assert run.condition("StorageReady")["status"] == "False"


def test_missing_image_is_reported(new_run: NewRun, stub_manifest: Manifest) -> None:
    run = new_run(stub_manifest("no-image", inference={"image": "localhost/nothing:1"}))
    _check_explained(run, "inference", "localhost/nothing:1")
    assert run.condition("PodsReady")["status"] == "False"


def test_missing_secret_is_reported(new_run: NewRun, stub_manifest: Manifest) -> None:
    run = new_run(stub_manifest("no-secret", trainer={"envFrom": [{"secretRef": {"name": "for-rlrun-hub"}}]}))
    _check_explained(run, "trainer", "for-rlrun-hub")
    assert run.condition("PodsReady")["status"] == "False"
