"""A running cluster as tests use it, independent of its provider."""

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn, Protocol, Self

from .errors import ClusterError
from .progress import wait_until

KUBECTL_TIMEOUT_S = 60.0
FAKE_NODE = "kwok.x-k8s.io/node"
FAKE_NODE_SIZE = {"cpu": "64", "memory": "512Gi", "pods": "110", "ephemeral-storage": "1Ti"}


class ApiServer(Protocol):
    """The API server's process, for tests of outages."""

    def stop(self) -> None:
        """End it; connections are refused until `start`."""

    def start(self) -> None:
        """Start it again and wait until it is ready."""

    def freeze(self) -> None:
        """Suspend it; requests hang until `thaw`."""

    def thaw(self) -> None:
        """Resume it and wait until it is ready."""


class Cluster:
    """A running cluster. As a context manager it is taken down at the end.

    Attributes:
        name: its name.
        provider: "kubeconfig", "kind" or "native".
        kubeconfig: an administrator's kubeconfig.
        bin: a folder that contains kubectl and helm.
        nodes: names of the nodes that run real containers.
    """

    provider = ""

    def __init__(self, name: str, kubeconfig: Path, bin_folder: Path, nodes: Sequence[str]) -> None:
        self.name, self.kubeconfig, self.bin, self.nodes = name, kubeconfig, bin_folder, tuple(nodes)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.down()

    def down(self) -> None:
        """Take the cluster down and remove its files."""
        raise NotImplementedError

    @property
    def environment(self) -> dict[str, str]:
        """Variables with which any program finds this cluster, kubectl and helm; caches stay out of the home folder."""
        scratch = self.bin.parent / "cache"
        return {
            **os.environ,
            "KUBECONFIG": str(self.kubeconfig),
            "PATH": f"{self.bin}{os.pathsep}{os.environ.get('PATH', '')}",
            "KUBECACHEDIR": str(scratch / "kubectl"),
            "HELM_CACHE_HOME": str(scratch / "helm"),
            "HELM_CONFIG_HOME": str(scratch / "helm"),
            "HELM_DATA_HOME": str(scratch / "helm"),
        }

    def kubectl(
        self, *arguments: str, stdin: str | None = None, check: bool = True, timeout: float = KUBECTL_TIMEOUT_S
    ) -> str:
        """Run kubectl.

        Args:
            stdin: text of its standard input, for `-f -`.
            check: whether a failure raises; otherwise the output is returned in any case.
            timeout: limit in seconds.

        Returns:
            Its standard output.

        Raises:
            ClusterError: it failed or did not end; the message has its error output.
        """
        return self._run("kubectl", arguments, stdin, check, timeout)

    def helm(
        self, *arguments: str, stdin: str | None = None, check: bool = True, timeout: float = KUBECTL_TIMEOUT_S
    ) -> str:
        """Run helm; arguments, result and errors as for `kubectl`."""
        return self._run("helm", arguments, stdin, check, timeout)

    def _run(self, program: str, arguments: Sequence[str], stdin: str | None, check: bool, timeout: float) -> str:
        shown = f"{program} {' '.join(arguments)}"
        try:
            result = subprocess.run(
                [str(self.bin / program), *arguments],
                input=stdin,
                stdin=subprocess.DEVNULL if stdin is None else None,
                capture_output=True,
                text=True,
                timeout=timeout,
                env=self.environment,
            )
        except subprocess.TimeoutExpired as expired:
            seen = expired.stdout.decode(errors="replace") if isinstance(expired.stdout, bytes) else ""
            raise ClusterError(
                f"`{shown}` did not end within {timeout:.0f} s\n{seen[-2000:]}{self._damage()}"
            ) from None
        if check and result.returncode != 0:
            raise ClusterError(f"`{shown}` failed with {result.returncode}: {result.stderr.strip()}{self._damage()}")
        return result.stdout

    def _damage(self) -> str:
        """Return the known damages of the cluster itself, for messages; empty without any."""
        return ""

    def load_image(self, *archives: Path) -> None:
        """Load the images of docker archives on every node under their names.

        Raises:
            ClusterError: an archive cannot be read, or this cluster takes no images.
        """
        raise NotImplementedError

    def add_fake_nodes(
        self, count: int, *, gpus: int = 8, labels: Mapping[str, str] | None = None, prefix: str = "fake"
    ) -> tuple[str, ...]:
        """Add nodes whose kubelet is kwok: pods become Ready at once, and no container runs.

        If the cluster has real nodes, the fake ones have the taint `kwok.x-k8s.io/node=fake:NoSchedule`, so that only
        pods that tolerate it are scheduled there.

        Args:
            count: number of nodes.
            gpus: `nvidia.com/gpu` of each; 0 for none.
            labels: additional labels of each.
            prefix: prefix of the names PREFIX-0, PREFIX-1, ...

        Returns:
            Their names, once they are Ready.

        Raises:
            ClusterError: a node of that name exists, or the nodes do not become Ready.
        """
        names = tuple(f"{prefix}-{index}" for index in range(count))
        items = [fake_node(name, gpus, labels or {}, tainted=bool(self.nodes)) for name in names]
        self.kubectl("create", "-f", "-", stdin=json.dumps({"apiVersion": "v1", "kind": "List", "items": items}))
        self._wait_ready(names)
        return names

    def _wait_ready(self, names: Sequence[str]) -> None:
        path = "{range .items[*]}{.metadata.name} {.status.conditions[?(@.type=='Ready')].status}{'\\n'}{end}"

        def not_ready() -> list[str]:
            lines = self.kubectl("get", "nodes", "-o", f"jsonpath={path}").splitlines()
            return sorted(set(names) - {line.split()[0] for line in lines if line.endswith(" True")})

        wait_until(lambda: not not_ready(), "nodes to be Ready", timeout=180, state=lambda: f"not Ready: {not_ready()}")

    def fake_gpus(self, node: str, count: int) -> None:
        """Let a real node advertise `count` `nvidia.com/gpu`; pods that request them run without any.

        Raises:
            ClusterError: the node does not show them within 120 s.
        """
        patch = json.dumps({"status": {"capacity": {"nvidia.com/gpu": str(count)}}})
        self.kubectl("patch", "node", node, "--subresource=status", "--type=merge", "-p", patch)
        path = "jsonpath={.status.allocatable.nvidia\\.com/gpu}"
        wait_until(
            lambda: self.kubectl("get", "node", node, "-o", path) == str(count),
            f"node {node} to offer {count} nvidia.com/gpu",
            timeout=120,
            interval=0.5,
        )

    # Operations that need machines of our own, which can be switched off.

    @property
    def api_server(self) -> ApiServer:
        """The API server's process."""
        self._native_only("api_server")

    def sh(self, machine: str, *command: str, timeout: float = 60.0) -> str:
        """Run a command as root inside a machine ("cp", "n0", ...) and return its output."""
        self._native_only("sh")

    def power_off(self, node: str) -> None:
        """Cut a node's power: all its processes end at once."""
        self._native_only("power_off")

    def power_on(self, node: str) -> None:
        """Start a node that is off; its disk is unchanged."""
        self._native_only("power_on")

    def freeze(self, node: str) -> None:
        """Suspend every process of a node."""
        self._native_only("freeze")

    def thaw(self, node: str) -> None:
        """Resume a frozen node."""
        self._native_only("thaw")

    def unplug(self, node: str) -> None:
        """Pull a node's network cable."""
        self._native_only("unplug")

    def plug(self, node: str) -> None:
        """Plug the cable in again."""
        self._native_only("plug")

    def isolate(self, node: str) -> None:
        """Cut a node off from all isolated nodes; it still reaches the API server. Isolate both nodes to separate them."""
        self._native_only("isolate")

    def join(self, node: str) -> None:
        """End `isolate`."""
        self._native_only("join")

    @property
    def audit_log(self) -> Path:
        """Audit log with one JSON line for each answered write request."""
        self._native_only("audit_log")

    def _native_only(self, what: str) -> NoReturn:
        raise ClusterError(
            f"{what}: only a native cluster can do this; cluster {self.name} comes from {self.provider} "
            "(python -m tests.cluster up --provider native)"
        )


def fake_node(name: str, gpus: int, labels: Mapping[str, str], *, tainted: bool) -> dict[str, object]:
    """Return the object of a node that kwok keeps alive."""
    size = {**FAKE_NODE_SIZE, **({"nvidia.com/gpu": str(gpus)} if gpus else {})}
    own = {"kubernetes.io/hostname": name, "kubernetes.io/os": "linux", "kubernetes.io/arch": "amd64"}
    taint = {"key": FAKE_NODE, "value": "fake", "effect": "NoSchedule"}
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "annotations": {FAKE_NODE: "fake"}, "labels": {**own, **labels}},
        "spec": {"taints": [taint] if tainted else []},
        "status": {"capacity": size, "allocatable": size},
    }
