"""ResourceQuotas and LimitRanges of a namespace: the status has the API server's message and the fix, and waiting runs
continue without help."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.cluster import Cluster
from tests.controlplane.harness import OperatorProcess, wait_for
from tests.controlplane.world import CORE, World

GPUS = {"trainer": {"gpusPerReplica": 1}, "inference": {"gpusPerReplica": 1}}
GPU = "requests.nvidia.com/gpu"


def set_quota(world: World, **hard: str) -> None:
    """Create or change the namespace's quota, and wait until it is enforced."""
    named = {name.replace("__", "/").replace("_", "."): amount for name, amount in hard.items()}
    path = world.path(CORE, "resourcequotas", "team")
    if world.kube.get(path) is None:
        world.kube("POST", world.path(CORE, "resourcequotas"), {"metadata": {"name": "team"}, "spec": {"hard": named}})
    else:
        world.kube("PATCH", path, {"spec": {"hard": named}})
    wait_for(lambda: world.kube("GET", path)["status"], lambda s: s.get("hard") == named, "the quota counts")


def create_limit_range(world: World, kind: str, **limits: Any) -> None:
    """Create the namespace's LimitRange."""
    spec = {"limits": [{"type": kind, **limits}]}
    world.kube("POST", world.path(CORE, "limitranges"), {"metadata": {"name": "range"}, "spec": spec})


def wait_condition(world: World, kind: str, reason: str, *words: str) -> str:
    """Wait until a condition of run `a` has this reason and these words; return its message."""
    found = wait_for(
        lambda: world.condition("a", kind),
        lambda c: c.get("reason") == reason and all(word in c.get("message", "") for word in words),
        f"{kind} is {reason}: {', '.join(words)}",
    )
    assert not world.status("a").get("restarts"), "no failure"
    return str(found["message"])


def test_gpus_over_quota_are_reported_and_waited_for(world: World) -> None:
    set_quota(world, requests_nvidia_com__gpu="1")
    world.create("a", **GPUS)
    wait_condition(
        world, "Scheduled", "QuotaExceeded", "exceeded quota: team", f"requested: {GPU}=1", f"limited: {GPU}=1"
    )
    set_quota(world, requests_nvidia_com__gpu="2")
    world.wait_pods_ready("a", 2)


@pytest.mark.full
@pytest.mark.parametrize(
    ("hard", "more", "asked"),
    [
        ({"persistentvolumeclaims": "0"}, {"persistentvolumeclaims": "1"}, "requested: persistentvolumeclaims=1"),
        ({"requests_storage": "1Gi"}, {"requests_storage": "200Gi"}, "requested: requests.storage=100Gi"),
    ],
    ids=["claims", "storage"],
)
def test_claim_over_quota_is_reported_before_pods_exist(
    world: World, hard: dict[str, str], more: dict[str, str], asked: str
) -> None:
    set_quota(world, **hard)
    world.create("a")
    wait_condition(world, "StorageReady", "QuotaExceeded", "exceeded quota: team", asked, "have it raised")
    assert world.kube.items(world.path(CORE, "pods")) == []
    set_quota(world, **more)
    world.wait_pods_ready("a", 2)


@pytest.mark.full
def test_quota_on_missing_limit_is_reported_with_fix(world: World) -> None:
    set_quota(world, limits_memory="64Gi")
    world.create("a")
    words = ("failed quota: team", "must specify limits.memory", ".resources, or add a LimitRange with defaults")
    wait_condition(world, "Scheduled", "QuotaExceeded", *words)
    create_limit_range(world, "Container", default={"memory": "1Gi"})
    world.wait_pods_ready("a", 2)


@pytest.mark.full
def test_maximum_below_request_is_reported_with_field(world: World) -> None:
    create_limit_range(world, "Container", max={"memory": "1Gi"})
    memory = {"resources": {"requests": {"memory": "2Gi"}, "limits": {"memory": "2Gi"}}}
    world.create("a", trainer=memory)
    message = wait_condition(world, "Scheduled", "PodsRefused", "maximum memory usage per Container is 1Gi")
    assert message.startswith("trainer: a LimitRange does not allow its pods"), message
    assert message.endswith("change trainer.resources, or have the namespace's LimitRange changed"), message


@pytest.mark.full
@pytest.mark.parametrize("role", ["trainer", "orchestrator"])
def test_default_limit_below_request_is_reported_and_waited_for(world: World, role: str) -> None:
    """For the orchestrator the operator creates the pod, and the API server reports an invalid pod."""
    create_limit_range(world, "Container", default={"memory": "512Mi"}, defaultRequest={"memory": "64Mi"})
    asks = {"resources": {"requests": {"memory": "1Gi"}}}
    world.create("a", **{role: asks | ({"batchSize": 16} if role == "orchestrator" else {})})
    message = wait_condition(world, "Scheduled", "PodsRefused", "must be less than or equal to memory limit of 512Mi")
    assert message.startswith(f"{role}: a LimitRange does not allow its pods"), message
    world.kube("DELETE", world.path(CORE, "limitranges", "range"))
    world.wait_pods_ready("a", 2)
    wait_for(lambda: len(world.pods("a")), lambda count: count == 3, "all pods are made")


def set_scoped_quota(world: World, name: str, pods: str, **scope: Any) -> None:
    """Create or change a quota of pods with scopes, and wait until it is enforced."""
    path = world.path(CORE, "resourcequotas", name)
    if world.kube.get(path) is None:
        made = {"metadata": {"name": name}, "spec": {"hard": {"pods": pods}, **scope}}
        world.kube("POST", world.path(CORE, "resourcequotas"), made)
    else:
        world.kube("PATCH", path, {"spec": {"hard": {"pods": pods}}})
    wait_for(
        lambda: world.kube("GET", path)["status"].get("hard"),
        lambda hard: hard == {"pods": pods},
        f"quota {name} counts",
    )


@pytest.mark.full
def test_queue_counts_scoped_quotas_like_api_server(
    cluster: Cluster, namespace: str, nodes: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Pods that request only devices are BestEffort. Pods without a priority class do not count in a quota for classes."""
    world = World(cluster, namespace)
    classes = [{"scopeName": "PriorityClass", "operator": "Exists"}]
    set_scoped_quota(world, "classes", "0", scopeSelector={"matchExpressions": classes})
    set_scoped_quota(world, "bounded", "0", scopes=["NotBestEffort"])
    set_scoped_quota(world, "loose", "2", scopes=["BestEffort", "NotTerminating"])
    own = {"RLRUN_WATCH_NAMESPACES": namespace, "POD_NAMESPACE": namespace, "RLRUN_OPERATOR_NAME": "scoped"}
    queue = json.dumps({"provider": "own"})
    with OperatorProcess(cluster, tmp_path_factory.mktemp("scoped"), "scoped", RLRUN_QUEUE=queue, **own):
        world.create("a", managedBy="scoped", **GPUS)
        status = world.wait_told("a", "quota loose: pods: requested 3, used 0 of 2, even if nothing else ran")
        assert (status["phase"], world.kube.items(world.path(CORE, "pods"))) == ("Queued", [])
        set_scoped_quota(world, "loose", "3")
        world.wait_pods_ready("a", 2)


@pytest.mark.full
def test_queue_holds_run_beyond_quota_without_pods(
    cluster: Cluster, namespace: str, nodes: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory
) -> None:
    world = World(cluster, namespace)
    set_quota(world, requests_nvidia_com__gpu="1")
    own = {"RLRUN_WATCH_NAMESPACES": namespace, "POD_NAMESPACE": namespace, "RLRUN_OPERATOR_NAME": "queued"}
    queue = json.dumps({"provider": "own"})
    with OperatorProcess(cluster, tmp_path_factory.mktemp("queued"), "queued", RLRUN_QUEUE=queue, **own):
        world.create("a", managedBy="queued", **GPUS)
        words = rf"quota team: {GPU}: requested 2, used 0 of 1, even if nothing else ran"
        status = world.wait_told("a", words)
        assert (status["phase"], world.condition("a", "Admitted")["reason"]) == ("Queued", "NeverFits")
        assert world.kube.items(world.path(CORE, "pods")) == []
        set_quota(world, requests_nvidia_com__gpu="2")
        world.wait_pods_ready("a", 2)
