"""The units to compare with: objects that somebody makes with one plain POST each, without the operator."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.many_runs import usage
from benchmarks.many_runs.fleet import PODS, SPEC, at_once, limit_seconds, look_seconds, ready_pods
from rlrun.api.resource import RLRunSpec
from rlrun_operator import render
from rlrun_operator.kube.resources import BY_KIND
from rlrun_operator.settings import RenderSettings
from tests.cluster import Cluster
from tests.controlplane.harness import Json
from tests.controlplane.world import World, run


@dataclass(frozen=True)
class ByHand:
    """Cost of objects that nobody's operator made."""

    count: int
    """Times the pods of a run."""
    ready: float
    """Seconds from the first request until all pods are ready."""
    cpu: dict[str, float]
    """Seconds of the control plane's processes in that time."""
    writes: float
    """Per run."""


def smallest(name: str, namespace: str) -> list[Json]:
    """A StatefulSet, a Deployment and a Pod with as many pods as a run has, of one container each."""
    spec = {"containers": [{"name": "main", "image": "bare", "resources": {"requests": {"cpu": "1m"}}}]}
    made: list[Json] = []
    for kind, role, body in (
        ("StatefulSet", "trainer", {"replicas": 1, "serviceName": "none"}),
        ("Deployment", "inference", {"replicas": SPEC["inference"]["replicas"]}),
        ("Pod", "orchestrator", None),
    ):
        labels = {"bare": f"{name}-{role}"}
        of_pods = {"selector": {"matchLabels": labels}, "template": {"metadata": {"labels": labels}, "spec": spec}}
        metadata = {"name": f"{name}-{role}", "namespace": namespace, "labels": labels}
        whole = spec if body is None else {**body, **of_pods}
        version = "v1" if body is None else "apps/v1"
        made.append({"apiVersion": version, "kind": kind, "metadata": metadata, "spec": whole})
    return made


def rendered(name: str, namespace: str) -> list[Json]:
    """Every child of such a run, as the operator makes it; nobody owns them."""
    spec = RLRunSpec.model_validate(run(name, **SPEC)["spec"])
    context = render.RunContext(name, namespace, "uid", spec, 1, RenderSettings())
    needs = render.render_prerequisites(context)
    key = render.api_key_secret(context, "the key of a run")
    made = [dict(child) for child in (*needs.create, key, *needs.apply, *render.render_workloads(context).existing)]
    for child in made:
        child["metadata"] = {k: v for k, v in child["metadata"].items() if k != "ownerReferences"}
    return made


def by_hand(cluster: Cluster, namespace: str, count: int, children: Callable[[str, str], list[Json]]) -> ByHand:
    """Create the children of `count` runs, and remove them once their pods are ready.

    Raises:
        SystemExit: they are not within the limit.
    """
    cluster.kubectl("create", "namespace", namespace)
    made = [children(f"run-{index:05d}", namespace) for index in range(count)]
    daemons = usage.processes(cluster)
    used, began, at = usage.cpu(daemons), time.monotonic(), time.time()

    def create(world: World, index: int) -> None:
        for child in made[index]:
            world.kube("POST", BY_KIND[child["kind"]].path(namespace), child)

    at_once(cluster, namespace, create, count)
    world, limit = World(cluster, namespace), limit_seconds(count)
    while (ready := len(ready_pods(world))) < count * PODS:
        if time.monotonic() - began > limit:
            raise SystemExit(f"after {limit:.0f} s only {ready} of {count * PODS} pods made by hand are ready")
        time.sleep(look_seconds(count))
    took, cpu = time.monotonic() - began, usage.spent(used, usage.cpu(daemons))
    writes = sum(usage.writes(cluster, at, time.time()).values()) / count
    cluster.kubectl("delete", "namespace", namespace, timeout=limit)
    return ByHand(count, took, cpu, writes)
