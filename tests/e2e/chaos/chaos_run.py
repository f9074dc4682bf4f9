"""A run that several threads read, with its volume on this machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.cluster import ClusterError
from tests.cluster.native.apiclient import ApiClient, ApiError
from tests.cluster.native.cluster import NativeCluster
from tests.e2e.cluster.kube_run import KubeRun


class ChaosRun(KubeRun):
    """A run of the matrix."""

    def __init__(self, cluster: NativeCluster, document: dict[str, Any], namespace: str) -> None:
        super().__init__(cluster, document, namespace)
        self.native = cluster
        self._client = ApiClient(cluster.kubeconfig)
        self.own_volume: Path | None = None
        """Name of a small volume, or None for one of the cluster's."""

    def read(self, path: str) -> dict[str, Any]:
        """Read as `KubeRun.read` does, with a connection for each request, because a thread of `History` reads too."""
        group, _, rest = path.partition("|")
        try:
            return self._client.get(f"{group}/namespaces/{self.namespace}/{rest}")
        except ApiError as error:
            raise ClusterError(str(error)) from None

    def folder(self) -> Path:
        """Return the run's folder on its volume, as a path of this machine."""
        if self.own_volume is not None:
            return self.own_volume / self.name
        volume = json.loads(self.cluster.kubectl("get", "pv", self.volume() or "", "-o", "json"))
        return self.native.state.volumes / Path(volume["spec"]["hostPath"]["path"]).name / self.name

    def volume(self) -> str | None:
        """Return the name of its volume, or None before it is bound."""
        claim = self.read(f"/api/v1|persistentvolumeclaims/{self.name}-data")
        name: str | None = claim["spec"].get("volumeName") if claim.get("status", {}).get("phase") == "Bound" else None
        return name
