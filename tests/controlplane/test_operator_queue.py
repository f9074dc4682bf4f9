"""The operator's queue on a real control plane: order, preemption, and loss of a node."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Mapping

import pytest

from rlrun_operator.times import format_rfc3339
from tests.cluster import Cluster
from tests.controlplane.harness import Json, wait_for
from tests.controlplane.installation import fake_nodes
from tests.controlplane.world import CORE, World

HERE = {"queue-test": "yes"}
GPUS = {role: {"gpusPerReplica": 1, "nodeSelector": HERE} for role in ("trainer", "inference")}
"""Fields of a run with two GPUs, which is the capacity of the node."""
SETTINGS = {"enabled": True, "startSeconds": 20}
"""Queue settings. The creation of a run's objects counts towards its start, and takes long on a busy machine."""


@pytest.fixture(scope="module")
def nodes(cluster: Cluster) -> Iterator[tuple[str, ...]]:
    """One node with room for one run."""
    with fake_nodes(cluster, 1, prefix="queue", gpus=2, labels=HERE) as names:
        yield names


@pytest.fixture(scope="module")
def operator_settings() -> Mapping[str, str]:
    """Settings with the operator's own queue."""
    return {"RLRUN_QUEUE": json.dumps(SETTINGS)}


def gpu_pods(world: World) -> dict[str, int]:
    """Return the number of GPU pods by run, terminating pods included."""
    found: dict[str, int] = {}
    for pod in world.kube.items(world.path(CORE, "pods")):
        if pod["metadata"]["labels"]["rlrun.io/role"] != "orchestrator" and pod["status"]["phase"] != "Succeeded":
            name = pod["metadata"]["labels"]["rlrun.io/run"]
            found[name] = found.get(name, 0) + 1
    return found


def wait_place(world: World, name: str, position: int, waiting: int, words: str) -> Json:
    """Wait until a run reports this position in the queue and a matching message."""
    return wait_for(
        lambda: world.status(name),
        lambda s: (
            s.get("phase") == "Queued"
            and (s.get("queue") or {}).get("position") == position
            and s["queue"]["waiting"] == waiting
            and re.search(words, s["message"]) is not None
        ),
        f"{name} waits in place {position} of {waiting}: /{words}/",
    )


def train(world: World, name: str, step: int, *, attempt: int = 1, **told: object) -> None:
    """Let an admitted run train."""
    world.wait_phase(name, "Starting", attempt=attempt)
    world.wait_pods_ready(name, 2)
    world.renew(name, step, attempt=attempt, checkpoint_step=step, **told)
    world.wait_phase(name, "Running", attempt=attempt)
    assert gpu_pods(world) == {name: 2}, "the others have no pods"


def test_queue_orders_preempts_and_survives_node_loss(world: World, cluster: Cluster, nodes: tuple[str, ...]) -> None:
    world.create("first", **GPUS)
    train(world, "first", 7)
    world.create("second", **GPUS)
    wait_place(
        world, "second", 1, 1, r"trainer needs 1 place with 1 free nvidia.com/gpu; 0 qualify \(queue-0: 0 free[;)]"
    )
    since = world.status("second")["queue"]["since"]
    wait_for(
        lambda: format_rfc3339(time.time()),
        lambda now: now > since,
        "who comes later has waited less, by whole seconds",
    )
    world.create("third", **GPUS)
    wait_place(world, "third", 2, 2, "position 2 of 2")
    line = cluster.kubectl("get", "rlr", "third", "-n", world.namespace)
    assert re.search(r"third\s+Queued", line), line

    world.create("urgent", priority=10, **GPUS)
    train(world, "urgent", 3)
    status = wait_place(world, "first", 1, 3, "position 1 of 3")
    assert (status["restarts"], status["checkpoint"]["latestCompleteStep"]) == (0, 7), "nothing is lost"
    world.wait_event("first", "Preempted")
    wait_place(world, "second", 2, 3, "position 2 of 3")

    world.kube("DELETE", f"/api/v1/nodes/{nodes[0]}")
    # The run's pods are deleted with the node and the next pods find no node, so the run leaves its place and reports
    # the missing node.
    wait_for(
        lambda: world.status("urgent"),
        lambda s: s.get("phase") == "Queued" and "0 qualify" in s["message"],
        "the run on the lost node waits again",
    )
    world.wait_event("urgent", "Released")
    wait_for(lambda: gpu_pods(world), lambda found: found == {}, "no run holds a pod")

    with fake_nodes(cluster, 1, prefix="queue-again", gpus=2, labels=HERE):
        attempt = world.status("urgent")["attempt"]
        train(world, "urgent", 5, attempt=attempt + 1, resumed_from_step=3)
        world.renew("urgent", 100, attempt=attempt + 1)
        world.end_pod(f"urgent-orchestrator-{attempt + 1}", 0)
        world.wait_phase("urgent", "Complete")

        train(world, "first", 8, attempt=2, resumed_from_step=7)
        status = world.status("first")
        assert (status["restarts"], status["checkpoint"]["stepsLostTotal"]) == (0, 0), (
            "preemption costs no step and no restart"
        )
        wait_place(world, "second", 1, 2, "position 1 of 2")
