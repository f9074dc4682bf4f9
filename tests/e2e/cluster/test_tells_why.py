"""What `kubectl describe` of a run that cannot start says: in words, with the role and the fix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.e2e.cluster.kube_run import KubeRun

Manifest = Callable[..., dict[str, Any]]
NewRun = Callable[[dict[str, Any]], KubeRun]

pytestmark = [pytest.mark.full, pytest.mark.timeout(300)]


def _told(run: KubeRun, *words: str) -> str:
    run.apply()

    def found() -> str | None:
        # What the manifest itself says does not count: only status and events are the operator's words.
        text = run.kubectl("describe", "rlr", run.name).partition("\nStatus:")[2]
        return text if all(word in text for word in words) else None

    text: str = run.wait(f"describe says {', '.join(words)}", found)
    return text


def test_no_gpu_node(new_run: NewRun, stub_manifest: Manifest) -> None:
    run = new_run(stub_manifest("no-gpu", trainer={"gpusPerReplica": 8}))
    _told(run, "trainer needs", "8 nvidia.com/gpu")
    assert run.status()["phase"] == "Starting"
    assert run.condition("Scheduled")["status"] == "False"


def test_wrong_label(new_run: NewRun, stub_manifest: Manifest) -> None:
    run = new_run(stub_manifest("wrong-label", inference={"nodeSelector": {"disk": "fast"}}))
    _told(run, "inference needs", "disk=fast")
    assert run.condition("Scheduled")["status"] == "False"


def test_unbound_claim(new_run: NewRun, stub_manifest: Manifest) -> None:
    run = new_run(stub_manifest("no-volume", storage={"claimTemplate": {"storageClassName": "broken", "size": "1Gi"}}))
    _told(run, "no-volume-data", "broken")
    assert run.condition("StorageReady")["status"] == "False"


def test_missing_storage_class(new_run: NewRun, stub_manifest: Manifest) -> None:
    run = new_run(stub_manifest("no-class", storage={"claimTemplate": {"storageClassName": "nowhere", "size": "1Gi"}}))
    _told(run, "no-class-data", "nowhere")
    assert run.condition("StorageReady")["status"] == "False"


def test_missing_image(new_run: NewRun, stub_manifest: Manifest) -> None:
    run = new_run(stub_manifest("no-image", inference={"image": "localhost/nothing:1"}))
    _told(run, "inference", "localhost/nothing:1")
    assert run.condition("PodsReady")["status"] == "False"


def test_missing_secret(new_run: NewRun, stub_manifest: Manifest) -> None:
    run = new_run(stub_manifest("no-secret", trainer={"envFrom": [{"secretRef": {"name": "for-rlrun-hub"}}]}))
    _told(run, "trainer", "for-rlrun-hub")
    assert run.condition("PodsReady")["status"] == "False"
