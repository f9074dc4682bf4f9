"""Cluster setup that all control-plane tests share."""

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
"""Labels of the nodes shared by all files."""
UNRESTRICTED = {"RLRUN_POLICY": '{"podTemplate": "Any", "secrets": ["*"]}'}
"""Settings of an operator without restrictions."""
TOO_BUSY = "request did not complete within requested"
BROKEN = Path(__file__).parent / "malformed" / "batch-not-divisible.yaml"
"""Manifest that the policy refuses."""


def install_crds(cluster: Cluster) -> None:
    """Install or update the CRDs, which is the first step of the installation."""
    wait_for(lambda: _install_crds(cluster), lambda late: not late, "Helm installs the CRDs", pause=1.0)
    wait_served(cluster)


def _install_crds(cluster: Cluster) -> str:
    """Return the error of a busy API server, which a client may retry, or an empty string after success."""
    chart = str(ROOT / "charts" / "rlrun-crds")
    try:
        cluster.helm("upgrade", "--install", "rlrun-crds", chart, "--namespace", "kube-system", timeout=300)
    except ClusterError as error:
        if TOO_BUSY not in str(error):
            raise
        return str(error)
    return ""


def wait_served(cluster: Cluster) -> None:
    """Wait until the API server serves and validates RLRuns: it applies a new policy a moment later.

    `kubectl wait --for=condition=Established` fails while the CRD has no conditions.
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
    """Run an operator for all namespaces, and check its log and its exit at the end.

    Args:
        cluster: cluster to serve.
        folder: folder for its log.
        environment: additional variables.
    """
    with OperatorProcess(cluster, folder, **environment) as operator:
        yield operator
        code, seconds = operator.stop()
    operator.check_log()
    assert (code, seconds < STOP_SECONDS) == (0, True), (code, seconds)


class SharedOperator:
    """The operator for all namespaces: one process for all files with the same settings.

    Args:
        cluster: cluster to serve.
        new_folder: function that returns a folder for the log of a process.
    """

    def __init__(self, cluster: Cluster, new_folder: Callable[[], Path]) -> None:
        self._cluster, self._new_folder = cluster, new_folder
        self._settings: dict[str, str] = {}
        self._operator: OperatorProcess | None = None
        self._running = ExitStack()

    def start(self, settings: Mapping[str, str]) -> OperatorProcess:
        """Return the operator with these settings, after stopping one with other settings."""
        if self._operator is None or self._settings != settings or not self._operator.running:
            self.stop()
            self._settings = dict(settings)
            operator = judged_operator(self._cluster, self._new_folder(), **settings)
            self._operator = self._running.enter_context(operator)
        return self._operator

    def stop(self) -> None:
        """Stop and check the operator, unless it has ended already: the file that used it reports that."""
        if self._operator is not None and self._operator.running:
            self._running.close()
        self._running.pop_all()
        self._operator = None


@contextmanager
def fake_nodes(
    cluster: Cluster, count: int, *, prefix: str, gpus: int = 8, labels: Mapping[str, str] | None = None
) -> Iterator[tuple[str, ...]]:
    """Create kwok nodes PREFIX-0, PREFIX-1, ... that are Ready until the end, by requests because each kubectl costs
    CPU time."""
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
    """Create an unused namespace; its deletion is not awaited."""
    name = f"test-{uuid.uuid4().hex[:8]}"
    kube = Kube(cluster.kubeconfig)
    kube("POST", "/api/v1/namespaces", {"metadata": {"name": name}})
    try:
        yield name
    finally:
        kube("DELETE", f"/api/v1/namespaces/{name}")
