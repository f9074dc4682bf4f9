"""Upgrade and rollback between an earlier release's charts and the present ones during a run.

`releases/charts-COMMIT.tar.gz` is `git archive COMMIT charts | gzip -9n`, so that the test needs no git history.
`python -m tests.e2e.upgrade` covers the operators and images of two releases.
"""

from __future__ import annotations

import json
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster import Cluster
from tests.controlplane.harness import wait_for
from tests.controlplane.installation import ROOT, install_crds
from tests.controlplane.test_operator_outages import operator_of, wait_seen
from tests.controlplane.world import World, run

EARLIER = Path(__file__).parent / "releases" / "charts-e3c4c31.tar.gz"
CRD = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/rlruns.rlrun.io"
RELEASE = "upgrade"
EDITED = ("leases", "poddisruptionbudgets")
"""Objects of a run that an edit changes without a new attempt."""
OBJECT_BYTES = 1_000_000
"""Size limit of an object, 1.5 MiB in etcd, less the records of its managers."""


pytestmark = pytest.mark.usefixtures("nodes")


@pytest.fixture(scope="module")
def earlier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The earlier release's charts."""
    folder = tmp_path_factory.mktemp("earlier")
    with tarfile.open(EARLIER) as archive:
        archive.extractall(folder, filter="data")
    return folder / "charts"


@pytest.fixture
def present(cluster: Cluster) -> Iterator[None]:
    """Reinstall the present resource after a test."""
    yield
    install_crds(cluster)


@pytest.fixture
def world(cluster: Cluster, namespace: str) -> World:
    """Namespace of the test."""
    return World(cluster, namespace)


def install_earlier_crds(world: World, charts: Path) -> None:
    """Install the earlier resource, which has no autoscaling of engines, and wait until the API server applies it."""
    world.cluster.helm("upgrade", "--install", "rlrun-crds", str(charts / "rlrun-crds"), "--namespace", "kube-system")
    wait_for(lambda: has_autoscale(world), lambda found: not found, "the earlier resource is served")


def has_autoscale(world: World) -> bool:
    """Return whether the present resource is installed."""
    return "autoscale" in json.dumps(world.kube("GET", CRD)["spec"])


def check_undisturbed(world: World, spec: Any, before: dict[str, tuple[str, int]], step: int) -> None:
    """Check that run `a` continues and that none of its objects was recreated."""
    wait_seen(world, "a", step)
    found = world.run("a")
    assert (found["spec"], found["metadata"]["generation"]) == (spec, 1)
    assert (found["status"]["attempt"], found["status"]["phase"]) == (1, "Running")
    assert world.versions("a", leave_out=("leases",)) == before


@pytest.mark.full
@pytest.mark.usefixtures("present")
def test_run_survives_crd_upgrade_and_downgrade(world: World, earlier: Path, tmp_path: Path) -> None:
    install_earlier_crds(world, earlier)
    with operator_of(world, tmp_path) as operator:
        world.start("a")
        spec, before = world.run("a")["spec"], world.settled("a")
        install_crds(world.cluster)
        assert has_autoscale(world)
        check_undisturbed(world, spec, before, 5)
        world.edit("a", {"maxSteps": 200})
        stored = world.run("a")
        assert stored["metadata"]["generation"] == 2, "what was stored before may be edited"
        world.create("b", inference={"autoscale": {"min": 1, "max": 2}}, priority=5)
        world.wait_phase("b", "Starting")

        install_earlier_crds(world, earlier)
        wait_seen(world, "a", 9)
        assert world.versions("a", leave_out=EDITED) == before
        assert world.run("a")["status"]["attempt"] == 1
        world.wait_pods_ready("b", 2)
        world.renew("b", 1)
        world.wait_phase("b", "Running")
        install_crds(world.cluster)
        wait_seen(world, "a", 12)
        assert world.versions("a", leave_out=EDITED) == before
        assert world.kube("GET", CRD)["status"]["storedVersions"] == ["v1alpha1"]
        operator.check_log()


def test_helm_values_survive_upgrade_and_rollback(world: World, earlier: Path, tmp_path: Path) -> None:
    """`--reuse-values` keeps the defaults of the earlier chart, so new values are missing."""
    cluster, ns = world.cluster, world.namespace
    system = f"{ns}-system"
    values = f"watchNamespaces={{{ns}}},replicas=0,readNodes=true,admissionPolicy.enabled=true"
    here = ("-n", system)
    cluster.helm("install", RELEASE, str(earlier / "rlrun-operator"), *here, "--create-namespace", "--set", values)
    chart = str(ROOT / "charts" / "rlrun-operator")
    try:
        cluster.helm("upgrade", RELEASE, chart, *here, "--reuse-values")
        cluster.helm("upgrade", RELEASE, chart, *here, "--reuse-values", "--set", "queue.provider=own")
        deployed = json.loads(cluster.helm("history", RELEASE, *here, "-o", "json"))
        assert [revision["status"] for revision in deployed][-1] == "deployed"
        cluster.helm("rollback", RELEASE, "1", *here)
    finally:
        cluster.helm("uninstall", RELEASE, *here)
        cluster.kubectl("delete", "namespace", system, "--wait=false")


@pytest.mark.full
@pytest.mark.usefixtures("present")
def test_second_api_version_is_served_without_webhook(world: World) -> None:
    """docs/life.md plans v1beta1 like this: the same schema and policy, converted by the API server without a webhook."""
    kube, spec = world.kube, world.kube("GET", CRD)["spec"]
    (stored,) = spec["versions"]
    second = {**stored, "name": "v1beta1", "storage": False}
    assert len(json.dumps([second, stored], separators=(",", ":"))) < OBJECT_BYTES
    try:
        kube("PATCH", CRD, {"spec": {"versions": [second, stored]}})
        beta = world.path("/apis/rlrun.io/v1beta1", "rlruns")
        wait_for(lambda: kube("GET", beta, ok=False), lambda a: a.get("kind") == "RLRunList", "it is served")
        world.create("old")
        read = kube("GET", f"{beta}/old")
        assert (read["apiVersion"], read["spec"]) == ("rlrun.io/v1beta1", run("old")["spec"])
        kube("POST", beta, {**run("new"), "apiVersion": "rlrun.io/v1beta1"})
        assert world.run("new")["spec"] == run("new")["spec"]
        uneven = {**run("bad", orchestrator={"batchSize": 15}), "apiVersion": "rlrun.io/v1beta1"}
        wait_for(
            lambda: str(kube("POST", f"{beta}?dryRun=All", uneven, ok=False).get("message")),
            lambda said: "must be divisible by" in said,
            "the policy judges it",
        )
        wait_for(
            lambda: kube("GET", "/apis/rlrun.io/v1beta1", ok=False).get("resources", []),
            lambda found: any(resource["name"] == "rlruns" for resource in found),
            "kubectl may find it",
        )
        assert "new" in world.cluster.kubectl("get", "rlruns.v1beta1.rlrun.io", "-n", world.namespace)
        assert kube("GET", CRD)["status"]["storedVersions"] == ["v1alpha1"]
    finally:
        kube("PATCH", CRD, {"spec": {"versions": [stored]}})
