"""What every test of the control plane sets up in the cluster."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import yaml

from tests.cluster import Cluster, ClusterError
from tests.cluster.base import fake_node
from tests.controlplane.harness import STOP_SECONDS, Kube, OperatorProcess, wait_for

ROOT = Path(__file__).parents[2]
SHARED_NODE = {"shared": "yes", "nvidia.com/gpu.product": "NVIDIA-H200"}
"""Labels of the nodes that all files share."""
UNRESTRICTED = {"RLRUN_POLICY": '{"podTemplate": "Any", "secrets": ["*"]}'}
"""Settings of an operator that allows everything."""
TOO_BUSY = "request did not complete within requested"
BROKEN = Path(__file__).parent / "malformed" / "batch-not-divisible.yaml"
"""A manifest that the policy refuses."""


def install_crds(cluster: Cluster) -> None:
    """The first step of the installation; repeated, it updates."""
    wait_for(lambda: _install_crds(cluster), lambda late: not late, "Helm installs the CRDs", pause=1.0)
    wait_served(cluster)


def _install_crds(cluster: Cluster) -> str:
    """Return the error of an API server that was too busy, which a client may repeat; empty if they are installed."""
    chart = str(ROOT / "charts" / "rlrun-crds")
    try:
        cluster.helm("upgrade", "--install", "rlrun-crds", chart, "--namespace", "kube-system", timeout=300)
    except ClusterError as error:
        if TOO_BUSY not in str(error):
            raise
        return str(error)
    return ""


def wait_served(cluster: Cluster) -> None:
    """Wait until RLRuns can be asked for, and are judged: the API server takes up a new policy a moment later.

    `kubectl wait --for=condition=Established` fails where the CRD has no conditions yet.
    """
    kube, broken = Kube(cluster.kubeconfig), yaml.safe_load(BROKEN.read_text())
    create = "/apis/rlrun.io/v1alpha1/namespaces/default/rlruns?dryRun=All"
    wait_for(
        lambda: str(kube("POST", create, broken, ok=False).get("message")),
        lambda answer: "must be divisible by" in answer,
        "the API server serves and judges RLRuns",
    )


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


class SharedOperator:
    """The operator of all namespaces: one process for all files that need the same settings.

    Args:
        cluster: that it serves.
        new_folder: returns a folder for the log of a process.
    """

    def __init__(self, cluster: Cluster, new_folder: Callable[[], Path]) -> None:
        self._cluster, self._new_folder = cluster, new_folder
        self._settings: dict[str, str] = {}
        self._operator: OperatorProcess | None = None
        self._running = ExitStack()

    def start(self, settings: Mapping[str, str]) -> OperatorProcess:
        """Return the operator with these settings; one with other settings is stopped before."""
        if self._operator is None or self._settings != settings or not self._operator.running:
            self.stop()
            self._settings = dict(settings)
            operator = judged_operator(self._cluster, self._new_folder(), **settings)
            self._operator = self._running.enter_context(operator)
        return self._operator

    def stop(self) -> None:
        """Stop and judge the operator, unless it has ended: the file whose test it served reports that."""
        if self._operator is not None and self._operator.running:
            self._running.close()
        self._running.pop_all()
        self._operator = None


@contextmanager
def fake_nodes(
    cluster: Cluster, count: int, *, prefix: str, gpus: int = 8, labels: Mapping[str, str] | None = None
) -> Iterator[tuple[str, ...]]:
    """Nodes PREFIX-0, PREFIX-1, ... of kwok, Ready, until the end; by requests, as each kubectl costs CPU time."""
    kube, names = Kube(cluster.kubeconfig), tuple(f"{prefix}-{index}" for index in range(count))
    try:
        for name in names:
            kube("POST", "/api/v1/nodes", fake_node(name, gpus, labels or {}, tainted=bool(cluster.nodes)))
        for name in names:
            wait_for(lambda name=name: kube("GET", f"/api/v1/nodes/{name}"), _is_ready, f"node {name} is Ready")  # type: ignore[misc]
        yield names
    finally:
        for name in names:
            kube("DELETE", f"/api/v1/nodes/{name}", ok=False)


def _is_ready(node: Mapping[str, Any]) -> bool:
    conditions = node["status"].get("conditions", ())
    return any(condition["type"] == "Ready" and condition["status"] == "True" for condition in conditions)


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
