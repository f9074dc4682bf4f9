"""What every test of the control plane sets up in the cluster."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.cluster import Cluster, ClusterError
from tests.cluster.progress import wait_until
from tests.controlplane.harness import STOP_SECONDS, Kube, OperatorProcess

ROOT = Path(__file__).parents[2]
BROKEN = Path(__file__).parent / "malformed" / "batch-not-divisible.yaml"
"""A manifest that the policy refuses."""


def install_crds(cluster: Cluster) -> None:
    """The first step of the installation; repeated, it updates."""
    chart = str(ROOT / "charts" / "rlrun-crds")
    cluster.helm("upgrade", "--install", "rlrun-crds", chart, "--namespace", "kube-system")
    wait_served(cluster)


def wait_served(cluster: Cluster) -> None:
    """Wait until RLRuns can be asked for, and are judged: the API server takes up a new policy a moment later.

    `kubectl wait --for=condition=Established` fails where the CRD has no conditions yet.
    """
    wait_until(lambda: _served(cluster), "the API server to serve RLRuns", timeout=30.0)


def _served(cluster: Cluster) -> bool:
    try:
        cluster.kubectl("create", "--dry-run=server", "-n", "default", "-f", str(BROKEN))
    except ClusterError as error:
        return "must be divisible by" in str(error)
    return False


@contextmanager
def judged_operator(cluster: Cluster, folder: Path, **environment: str) -> Iterator[OperatorProcess]:
    """An operator for all namespaces; at the end its log and the way it ends are judged, too.

    Args:
        cluster: that it serves.
        folder: for its log.
        environment: more variables.
    """
    with OperatorProcess(cluster, folder, **environment) as operator:
        yield operator
        code, seconds = operator.stop()
    operator.check_log()
    assert (code, seconds < STOP_SECONDS) == (0, True), (code, seconds)


@contextmanager
def fresh_namespace(cluster: Cluster) -> Iterator[str]:
    """A namespace that nobody else uses; its deletion is not waited for."""
    name = f"test-{uuid.uuid4().hex[:8]}"
    kube = Kube(cluster.kubeconfig)
    kube("POST", "/api/v1/namespaces", {"metadata": {"name": name}})
    try:
        yield name
    finally:
        kube("DELETE", f"/api/v1/namespaces/{name}")
