"""A real cluster of two nodes with the images of this checkout and the operator installed by Helm."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from tests.cluster import api, deploy
from tests.cluster.images import BuiltImage, build
from tests.e2e.cluster.kube_run import KubeRun, example

NAMESPACE = "team-a"
NAME = "e2e"
USE = "RLRUN_TEST_CLUSTER"
"""Variable with the name of a running cluster of two nodes to reuse while a test is written."""
REAL = "test_real_images.py"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put tests last from which nodes need a minute to recover: a kubelet retries an absent API server after up to 60
    s."""
    items.sort(key=lambda item: item.get_closest_marker("nodes_recover") is not None)


@pytest.fixture(scope="session")
def images(request: pytest.FixtureRequest) -> Mapping[str, BuiltImage]:
    """Images of this checkout; the large images of the real roles only if a test needs them."""
    real = any(item.path.name == REAL for item in request.session.items)
    return build(["operator", "stub", *(("trainer", "inference") if real else ())])


@pytest.fixture(scope="session")
def references(images: Mapping[str, BuiltImage]) -> Mapping[str, str]:
    """Images for the installation of the operator: without real roles, stubs are its default images."""
    stub = images["stub"].reference
    return {"trainer": stub, "inference": stub, **{name: image.reference for name, image in images.items()}}


@pytest.fixture(scope="session")
def cluster(images: Mapping[str, BuiltImage], references: Mapping[str, str]) -> Iterator[api.Cluster]:
    """The cluster with the product installed."""
    given = os.environ.get(USE)
    archives = [image.archive for image in images.values()]
    if given:
        cluster = api.attach(given)
        cluster.load_image(*archives)
    else:
        # Another test run on this machine may hold the usual name.
        cluster = api.up(
            NAME if api.find(NAME) is None else f"{NAME}-{os.getpid()}", nodes=2, images=archives, tie=True
        )
    try:
        deploy.install(cluster, references, watch=[NAMESPACE])
        yield cluster
        log = cluster.kubectl("logs", "-n", deploy.SYSTEM, f"deploy/{deploy.RELEASE}", "--tail=-1", check=False)
        assert "Traceback" not in log, log
        assert "unexpected" not in log, log
    finally:
        if given:  # the next session uses the same names
            cluster.kubectl("delete", "rlr,pods", "--all", "-n", NAMESPACE, "--wait", timeout=120)
        else:
            cluster.down()


@pytest.fixture
def new_run(cluster: api.Cluster) -> Iterator[Callable[[dict[str, Any]], KubeRun]]:
    """Factory of runs. Each run is deleted at the end with its claim, without a wait, because the next test uses other
    names."""
    made: list[KubeRun] = []

    def make(document: dict[str, Any]) -> KubeRun:
        run = KubeRun(cluster, document, NAMESPACE)
        made.append(run)
        return run

    yield make
    for run in made:
        run.kubectl("delete", f"rlr/{run.name}", f"pvc/{run.name}-data", "--ignore-not-found", "--wait=false")


@pytest.fixture(scope="session")
def stub_manifest(images: Mapping[str, BuiltImage]) -> Callable[..., dict[str, Any]]:
    """Return a quickstart whose trainer and engine are stubs; only the images differ."""

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
