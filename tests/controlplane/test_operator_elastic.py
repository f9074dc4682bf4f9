"""Elastic engines on a real control plane: automatic scaling, draining, and `kubectl scale`."""

from __future__ import annotations

import re
from typing import Any

import pytest

from rlrun.protocol.messages.lease_annotations import EngineLoad
from tests.cluster import Cluster
from tests.controlplane.harness import wait_for
from tests.controlplane.world import APPS, CORE, LEASES, World

SECONDS = 10
AUTOSCALE = {"min": 1, "max": 3, "stabilizationSeconds": SECONDS}


def load(engines: int, **shares: float) -> str:
    """Return a load report of engines that are always busy while the trainer waits half of the time."""
    values: dict[str, Any] = {"waited": 0.5, "ahead": 0.0, "idle": 0.0, "busy": 1.0, "requests": 8.0, "waiting": 8.0}
    return EngineLoad(engines=engines, seconds=2 * SECONDS, steps=4, **values | shares).text()


def engines_of(world: World) -> list[dict[str, Any]]:
    return [p for p in world.pods("a") if p["metadata"]["labels"]["rlrun.io/role"] == "inference"]


def wait_engines(world: World, count: int) -> list[dict[str, Any]]:
    """Wait until the Deployment has `count` replicas and the same number of ready pods."""
    wait_for(
        lambda: world.kube("GET", world.path(APPS, "deployments", "a-inference")),
        lambda d: d["spec"]["replicas"] == count == d["status"].get("readyReplicas"),
        f"{count} engines",
    )
    return wait_for(lambda: engines_of(world), lambda found: len(found) == count, f"{count} engine pods")


def test_engine_count_follows_load_and_removes_drained_engine(world: World) -> None:
    world.start("a", inference={"autoscale": AUTOSCALE}, checkpoint={"interval": 50})
    (first,) = wait_engines(world, 1)
    world.renew("a", 2, engines=load(1), engines_drained="")
    found = {pod["metadata"]["name"] for pod in wait_engines(world, 2)}
    status = world.status("a")
    assert status["inference"]["desired"] == 2
    world.wait_event("a", "InferenceScaled")
    lease = world.kube("GET", world.path(LEASES, "leases", "a-progress"))["metadata"]["annotations"]
    assert lease["rlrun.io/engines-wanted"] == "2"

    world.renew(
        "a",
        3,
        engines=load(2, waited=0.0, idle=0.6, busy=0.4, ahead=0.6, requests=1.0, waiting=0.0),
        engines_drained="",
    )
    wait_for(lambda: world.status("a")["inference"]["desired"], lambda n: n == 1, "one engine is enough")
    assert len(engines_of(world)) == 2, "none goes before it is drained"
    (newer,) = found - {first["metadata"]["name"]}
    address = world.kube("GET", world.path(CORE, "pods", newer))["status"]["podIP"]
    world.renew("a", 4, engines=load(2, waited=0.0), engines_drained=address)
    (left,) = wait_engines(world, 1)
    assert left["metadata"]["name"] == first["metadata"]["name"], "the drained one has gone"
    assert world.status("a")["restarts"] == 0


def test_kubectl_scale_sets_fixed_engine_count(world: World, cluster: Cluster) -> None:
    world.start("a", inference={"replicas": 1})
    cluster.kubectl("scale", "rlr", "a", "-n", world.namespace, "--replicas", "2")
    wait_engines(world, 2)
    # The operator counts engines in a later pass than the one that reads the Deployment.
    scale = wait_for(
        lambda: world.kube("GET", world.path("/apis/rlrun.io/v1alpha1", "rlruns", "a") + "/scale"),
        lambda s: (s["spec"]["replicas"], s["status"]["replicas"]) == (2, 2),
        "the scale subresource shows both engines",
    )
    assert "rlrun.io/role=inference" in scale["status"]["selector"]


@pytest.mark.full
def test_kubectl_scale_of_autoscaled_run_is_reported_invalid(world: World, cluster: Cluster) -> None:
    """The API server applies no validation rule to the scale subresource."""
    world.start("a", inference={"autoscale": AUTOSCALE})
    cluster.kubectl("scale", "rlr", "a", "-n", world.namespace, "--replicas", "2")
    words = r"spec\.inference: replicas \(2\) cannot be set with autoscale"
    wait_for(
        lambda: world.condition("a", "ConfigurationValid"),
        lambda c: c["status"] == "False" and re.search(words, c["message"]) is not None,
        "the run says what is wrong",
    )
    status = world.status("a")
    assert (status["phase"], status["inference"]["desired"], len(engines_of(world))) == ("Running", 1, 1)
    world.edit("a", {"inference": {"replicas": None}})
    wait_for(lambda: world.condition("a", "ConfigurationValid")["status"], lambda s: s == "True", "it is valid again")
    with pytest.raises(AssertionError, match="cannot be set with autoscale"):
        world.edit("a", {"inference": {"replicas": 2}})
