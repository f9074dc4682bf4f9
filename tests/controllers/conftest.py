"""Real controllers on the control plane of `tests/controlplane`: Kueue's own manager."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cluster import Cluster
from tests.controllers.kueue import RealKueue
from tests.controlplane.conftest import cluster, namespace, world

__all__ = ["cluster", "kueue", "namespace", "nodes", "world"]


@pytest.fixture(scope="module")
def nodes(cluster: Cluster) -> Iterator[tuple[str, ...]]:
    """Two nodes with two flavors, each with eight GPUs."""
    names = cluster.add_fake_nodes(2, prefix="flavor", gpus=8)
    for name, flavor in zip(names, ("h100", "a100"), strict=True):
        cluster.kubectl("label", "node", name, f"gpu={flavor}", "--overwrite")
    yield names
    cluster.kubectl("delete", "node", *names)


@pytest.fixture(scope="module")
def kueue(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealKueue]:
    """Kueue's manager with its definitions and webhooks, from its own manifests."""
    with RealKueue(cluster, tmp_path_factory.mktemp("kueue")) as running:
        yield running
