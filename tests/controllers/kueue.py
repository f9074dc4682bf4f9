"""Kueue's own manager on a control plane: definitions, webhooks and process, all from the pinned Go module."""

from __future__ import annotations

import base64
import json
import os
import socket
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Self

import yaml

from rlrun.local.preflight import free_port
from tests.cluster import Cluster, binaries
from tests.cluster.native.pki import Authority
from tests.cluster.progress import Progress
from tests.controlplane.harness import Json, Kube, wait_for

KUEUE = "/apis/kueue.x-k8s.io/v1beta2"
MODULE = "sigs.k8s.io/kueue"
NAMESPACE = "kueue-system"
HOOKS = ("kueue-x-k8s-io", "apps-v1-statefulset", "apps-v1-deployment", "-v1-pod")
"""Parts of the paths of webhooks whose kinds the control plane serves."""


def configuration(port: int, certificates: Path, **more: Any) -> Json:
    """Return a configuration of the manager as in docs/queueing.md, with the keys of `more`."""
    return {
        "apiVersion": "config.kueue.x-k8s.io/v1beta2",
        "kind": "Configuration",
        "namespace": NAMESPACE,
        "health": {"healthProbeBindAddress": "0"},
        "metrics": {"bindAddress": "0"},
        "webhook": {"port": port, "certDir": str(certificates)},
        "leaderElection": {"leaderElect": False},
        "internalCertManagement": {"enable": False},
        "integrations": {
            "frameworks": ["batch/job", "pod", "deployment", "statefulset"],
            "externalFrameworks": ["RLRun.v1alpha1.rlrun.io"],
        },
        **more,
    }


def sources() -> Path:
    """Return the folder of the pinned module."""
    folder = binaries.TOOLS["kueue"].folder
    command = ["go", "list", "-m", "-f", "{{.Dir}}", MODULE]
    environment = {**os.environ, "GOTOOLCHAIN": "local", "GOFLAGS": "-mod=mod"}
    return Path(
        subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True, text=True).stdout.strip()
    )


class RealKueue:
    """The manager as a separate process.

    Args:
        cluster: native cluster, whose API server reaches the manager's webhooks on the host.
        folder: folder for configuration, certificates and log.
    """

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self._cluster = cluster
        self._folder = folder
        self.log_file = folder / "kueue.log"
        self._port = free_port()
        self._host: str = cluster.plan.host_address  # type: ignore[attr-defined]
        self._process: subprocess.Popen[bytes] | None = None
        self.kube = Kube(cluster.kubeconfig)

    def __enter__(self) -> Self:
        certificates = self._folder / "etc" / "kueue" / "metrics" / "certs"
        certificates.mkdir(parents=True)
        authority = Authority(certificates)
        authority.sign("tls", "kueue", "server", names=(self._host,))
        self._apply(_manifests(sources() / "config/components/crd/bases"))
        wait_for(lambda: self.kube("GET", KUEUE, ok=False), _all_served, "Kueue's kinds are served")
        self._cluster.kubectl("create", "namespace", NAMESPACE)
        self.start()
        self._apply(self._webhooks(certificates / "ca.crt"))
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        for kind in ("mutatingwebhookconfiguration", "validatingwebhookconfiguration"):
            self._cluster.kubectl("delete", kind, "-l", "test=kueue", "--ignore-not-found")

    def start(self, **more: Any) -> None:
        """Start it with `more` in its configuration, and wait until its webhooks answer."""
        certificates = self._folder / "etc" / "kueue" / "metrics" / "certs"
        config = self._folder / "configuration.yaml"
        config.write_text(yaml.safe_dump(configuration(self._port, certificates, **more)))
        program = binaries.find("kueue", progress=Progress(print))["kueue"]
        options = f'--config "{config}" --feature-gates VisibilityOnDemand=false --zap-log-level=2'
        # Kueue reads the certificates of its metrics from a fixed path below /etc, so the process gets its own /etc.
        inside = f'mount --bind "{self._folder}/etc" /etc && exec "{program}" {options}'
        with self.log_file.open("ab") as log:
            self._process = subprocess.Popen(
                [
                    "setpriv",
                    "--pdeathsig",
                    "KILL",
                    "unshare",
                    "--mount",
                    "--propagation",
                    "private",
                    "sh",
                    "-c",
                    inside,
                ],
                env=self._cluster.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        wait_for(self._state, lambda seen: seen == "listens", "Kueue's webhooks listen")

    def stop(self) -> None:
        """Send SIGTERM and wait."""
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            self._process.wait(timeout=60)

    def kill(self) -> None:
        """Send SIGKILL."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def log(self) -> str:
        """Return the whole log."""
        return self.log_file.read_text(errors="replace")

    def _state(self) -> str:
        assert self._process is not None
        if self._process.poll() is not None:
            return f"ended\n{self.log()[-4000:]}"
        with socket.socket() as one:
            one.settimeout(1.0)
            return "listens" if one.connect_ex((self._host, self._port)) == 0 else "does not listen"

    def _webhooks(self, authority: Path) -> Iterator[Json]:
        """Return Kueue's webhooks for the served kinds, with the host's address."""
        bundle = base64.b64encode(authority.read_bytes()).decode()
        for found in _manifests(sources() / "config/components/webhook"):
            if not found["kind"].endswith("WebhookConfiguration"):
                continue
            kept = []
            for hook in found["webhooks"]:
                path = hook["clientConfig"]["service"]["path"]
                if any(part in path for part in HOOKS):
                    away = {
                        "key": "kubernetes.io/metadata.name",
                        "operator": "NotIn",
                        "values": ["kube-system", NAMESPACE],
                    }
                    url = f"https://{self._host}:{self._port}{path}"
                    kept.append(
                        {
                            **hook,
                            "clientConfig": {"url": url, "caBundle": bundle},
                            "namespaceSelector": {"matchExpressions": [away]},
                        }
                    )
            yield {**found, "metadata": {**found["metadata"], "labels": {"test": "kueue"}}, "webhooks": kept}

    def _apply(self, manifests: Iterable[Json]) -> None:
        items = {"apiVersion": "v1", "kind": "List", "items": list(manifests)}
        self._cluster.kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", stdin=json.dumps(items))


def _all_served(group: Json) -> bool:
    return {"workloads", "localqueues", "clusterqueues", "resourceflavors"} <= {
        one["name"] for one in group.get("resources", ())
    }


def _manifests(folder: Path) -> Iterator[Json]:
    for path in sorted(folder.glob("*.yaml")):
        yield from (
            one
            for one in yaml.safe_load_all(path.read_text())
            if one and "kind" in one and one["kind"] != "Kustomization"
        )
