"""Suspension, edit and resumption of runs on a real control plane."""

from __future__ import annotations

import re

import pytest

from tests.cluster import Cluster
from tests.controlplane.harness import wait_for
from tests.controlplane.world import APPS, CORE, World


def no_pods(world: World) -> bool:
    return world.kube.items(world.path(CORE, "pods")) == []


def test_suspended_and_edited_run_resumes_without_loss(world: World) -> None:
    world.start("a", step=7)
    world.renew("a", 7, checkpoint_step=7)
    world.edit("a", {"suspend": True})
    status = world.wait_phase("a", "Suspended")
    assert no_pods(world)
    assert world.kube.items(world.path(APPS, "deployments")) == []
    assert len(world.kube.items(world.path(CORE, "persistentvolumeclaims"))) == 1
    assert re.search("continues from the checkpoint of step 7, when", status["message"]), status["message"]
    assert world.condition("a", "Reconciling")["status"] == "False"

    world.edit("a", {"suspend": False, "trainer": {"replicas": 2}})
    world.wait_phase("a", "Starting", attempt=2)
    wait_for(lambda: world.status("a"), lambda s: s["trainerReady"] == "2/2", "the edited trainer")
    world.renew("a", 8, attempt=2, resumed_from_step=7, checkpoint_step=7)
    status = world.wait_phase("a", "Running", attempt=2)
    assert (status["restarts"], status["checkpoint"]["stepsLostTotal"]) == (0, 0)


@pytest.mark.full
def test_run_created_suspended_starts_and_restarts_by_annotation(world: World, cluster: Cluster) -> None:
    world.create("a", suspend=True)
    world.wait_phase("a", "Suspended")
    assert no_pods(world)
    world.edit("a", {"suspend": False})
    world.wait_phase("a", "Starting", attempt=1)
    world.wait_pods_ready("a", 2)
    world.renew("a", 3)
    world.wait_phase("a", "Running")
    asks = "rlrun.io/restart-requested-at=2026-01-02T03:04:05Z"
    cluster.kubectl("annotate", "rlr", "a", "-n", world.namespace, asks)
    status = world.wait_phase("a", "Starting", attempt=2)
    assert (status["restarts"], status["restartsCountedTowardsMax"]) == (1, 0)
    assert status["restartRequestedAt"] == "2026-01-02T03:04:05Z"


@pytest.mark.full
def test_complete_run_continues_with_raised_steps(world: World) -> None:
    world.start("a", step=100, cleanupPolicy={"onComplete": "All"})
    world.end_pod("a-orchestrator-1", 0)
    world.wait_phase("a", "Complete")
    wait_for(lambda: no_pods(world), bool, "every pod is gone")
    world.edit("a", {"maxSteps": 200})
    status = world.wait_phase("a", "Starting", attempt=2)
    assert (status["steps"], status["maxSteps"], status["restarts"]) == ("100/200", 200, 0)
