"""Two runs, one trainer, on a real cluster whose network policies are enforced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.e2e.cluster.kube_run import KubeRun

Manifest = Callable[..., dict[str, Any]]
NewRun = Callable[[dict[str, Any]], KubeRun]
STEPS = 40
"""Of the guest; the host goes on for as long as the test takes."""

pytestmark = pytest.mark.timeout(600)


def guest_of(host: dict[str, Any], name: str, steps: int) -> dict[str, Any]:
    """A run that differs from its host in what a guest may have for itself."""
    spec = {key: value for key, value in host["spec"].items() if key != "inference"}
    spec |= {"maxSteps": steps, "seed": 2, "trainer": {"sharedWith": host["metadata"]["name"], "lora": {"rank": 8}}}
    return host | {"metadata": {"name": name}, "spec": spec}


def test_a_guest_is_deleted_made_again_and_survives_the_trainer_that_it_shares(
    new_run: NewRun, stub_manifest: Manifest
) -> None:
    lora = {"lora": {"rank": 16, "slots": 2}, "guests": ["*"]}
    manifest = stub_manifest("host", {"trainer": {"stepSeconds": 0.2}}, steps=5000, trainer=lora)
    guest, host = new_run(guest_of(manifest, "guest", STEPS)), new_run(manifest)
    guest.apply()
    guest.wait("it says what it waits for", lambda: guest.status().get("reason") == "HostNotFound")
    host.apply()
    guest.wait_checkpoint(5)
    assert [pod["metadata"]["labels"]["rlrun.io/role"] for pod in guest.pods()] == ["orchestrator"]

    before = host.identities()
    guest.delete()
    guest.apply()
    guest.wait("it goes on", lambda: guest.step() > 5 and guest.status()["phase"] == "Running")
    assert host.identities() == before, "nothing of the host is touched"
    status = guest.status()
    assert status["checkpoint"]["resumedFromStep"] >= 5
    assert status["restartsCountedTowardsMax"] == 0

    attempt = guest.attempt()
    host.kill_process("host-trainer-0", "trainer", "rlrun.stub.trainer")
    host.wait("attempt 2 of the host trains", lambda: host.attempt() == 2 and host.status()["phase"] == "Running")
    guest.wait("its next attempt trains", lambda: guest.attempt() > attempt and guest.status()["phase"] == "Running")

    final = guest.wait_phase("Complete")
    assert (final["progress"]["step"], final["restartsCountedTowardsMax"]) == (STEPS, 0)
    assert final["failures"][-1]["reason"] == "HostRestarted"
    host.wait("the host has forgotten it", lambda: "guests" not in host.status())
    status = host.status()
    assert (status["phase"], status["attempt"], status["restartsCountedTowardsMax"]) == ("Running", 2, 1)
