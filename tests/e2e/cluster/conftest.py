"""A real cluster of two nodes, the images of this checkout, and the operator installed by Helm."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from tests.cluster import api, deploy
from tests.cluster.images import BuiltImage, build
from tests.e2e.cluster.kube_run import KubeRun, example

NAMESPACE = "team-a"
CLUSTER = "e2e"


@pytest.fixture(scope="session")
def images() -> Mapping[str, BuiltImage]:
    """All images of this checkout."""
    return build(["operator", "stub", "trainer", "inference"])


@pytest.fixture(scope="session")
def cluster(images: Mapping[str, BuiltImage]) -> Iterator[api.Cluster]:
    """The cluster; the namespace of the runs enforces the restricted Pod Security Standard."""
    cluster = api.up(CLUSTER, nodes=2, images=[image.archive for image in images.values()], tie=True)
    try:
        cluster.kubectl("create", "namespace", NAMESPACE)
        cluster.kubectl("label", "namespace", NAMESPACE, "pod-security.kubernetes.io/enforce=restricted")
        deploy.install(cluster, {name: image.reference for name, image in images.items()}, watch=[NAMESPACE])
        yield cluster
        log = cluster.kubectl("logs", "-n", deploy.SYSTEM, f"deploy/{deploy.RELEASE}", "--tail=-1", check=False)
        assert "Traceback" not in log, log
    finally:
        api.down(CLUSTER)


@pytest.fixture
def new_run(cluster: api.Cluster) -> Iterator[Callable[[dict[str, Any]], KubeRun]]:
    """Makes runs; each is deleted at the end, with its claim."""
    made: list[KubeRun] = []

    def make(document: dict[str, Any]) -> KubeRun:
        run = KubeRun(cluster, document, NAMESPACE)
        made.append(run)
        return run

    yield make
    for run in made:
        run.delete()
    for run in made:
        run.kubectl("delete", "pvc", f"{run.name}-data", "--ignore-not-found", "--wait", timeout=60)


@pytest.fixture(scope="session")
def stub_manifest(images: Mapping[str, BuiltImage]) -> Callable[..., dict[str, Any]]:
    """A quickstart whose trainer and engine are stubs: only the image differs."""

    def manifest(name: str, script: Mapping[str, Any] | None = None, *, steps: int = 40, **spec: Any) -> dict[str, Any]:
        document = example("quickstart", maxSteps=steps, checkpoint={"interval": 5, "keepLast": 3}, **spec)
        document["metadata"]["name"] = name
        document["spec"].pop("evaluation", None)
        document["spec"]["orchestrator"] |= {"batchSize": 32}
        pace = {"trainer": {"stepSeconds": 0.5}} | dict(script or {})
        for role in ("trainer", "inference", "orchestrator"):
            document["spec"].setdefault(role, {}).setdefault("image", images["stub"].reference)
            document["spec"][role].setdefault("env", []).append({"name": "STUB_SCRIPT", "value": json.dumps(pace)})
        return document

    return manifest
