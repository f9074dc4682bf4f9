"""Silent progress Leases of a live run, with and without a ready orchestrator."""

from __future__ import annotations

import time

import pytest

from tests.controlplane.world import World

pytestmark = pytest.mark.full


def test_silent_lease_is_reported_without_restart(world: World) -> None:
    """The startup deadline passes twice. Only the Lease is silent."""
    world.create("mute", progress={"startupDeadlineSeconds": 35, "deadlineSeconds": 35})
    world.wait_phase("mute", "Starting")
    world.wait_pods_ready("mute", 2)
    told = world.wait_told("mute", "Lease mute-progress has not been renewed in this attempt")
    assert "NetworkPolicy mute-egress opens" in told["message"]
    assert world.condition("mute", "Progressing")["reason"] == "HeartbeatLost"
    world.wait_event("mute", "HeartbeatLost")
    time.sleep(15)
    status = world.status("mute")
    assert (status["attempt"], status["phase"], status.get("restarts", 0)) == (1, "Starting", 0)
    assert world.events("mute").count("HeartbeatLost") == 1
    world.end_pod("mute-orchestrator-1", 0)
    world.wait_phase("mute", "Complete")


def test_silent_run_with_unready_orchestrator_restarts(world: World) -> None:
    world.create("stuck", progress={"startupDeadlineSeconds": 20, "deadlineSeconds": 20})
    world.wait_phase("stuck", "Starting")
    world.wait_pods_ready("stuck", 2)
    world.set_ready("stuck-orchestrator-1", ready=False)
    failure = world.wait_phase("stuck", "Starting", attempt=2)["lastFailure"]
    assert (failure["reason"], failure["role"], failure["counted"]) == ("NoProgress", "orchestrator", True)
