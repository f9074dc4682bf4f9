"""Restore of etcd from a backup under a running operator: all resource versions and the state of its runs go back."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster import Cluster, up
from tests.cluster.native.cluster import NativeCluster
from tests.cluster.native.plan import CONTROL_PLANE
from tests.cluster.progress import wait_until
from tests.controlplane.harness import OperatorProcess, wait_for
from tests.controlplane.installation import fake_nodes, fresh_namespace, install_crds
from tests.controlplane.world import World

pytestmark = pytest.mark.full
DAEMONS = ("kube-apiserver", "etcd")


@pytest.fixture
def own_cluster() -> Iterator[NativeCluster]:
    """A cluster for this test only, because its etcd is stopped."""
    cluster = up("restored", nodes=0, tie=True)
    try:
        if not isinstance(cluster, NativeCluster):
            pytest.skip("the provider's etcd cannot be stopped")
        install_crds(cluster)
        yield cluster
    finally:
        cluster.down()


class Etcd:
    """Data of a cluster's etcd, changed while its daemons are stopped."""

    def __init__(self, cluster: NativeCluster, backup: Path) -> None:
        self._machine = cluster.state.machine(CONTROL_PLANE)
        self._server, self._backup = cluster.api_server, backup
        self._data = self._machine.lib / "etcd"

    def save(self) -> None:
        """Take a backup."""
        self._stop()
        shutil.copytree(self._data, self._backup)
        self._server.start()

    def restore(self) -> None:
        """Replace the data with the backup."""
        self._stop()
        shutil.rmtree(self._data)
        shutil.copytree(self._backup, self._data)
        self._server.start()

    def _stop(self) -> None:
        (self._machine.control / "stopped").write_text("\n".join(DAEMONS) + "\n")
        for daemon in DAEMONS:
            wait_until(
                lambda d=daemon: not (self._machine.control / f"{d}.pid").exists(), f"{daemon} to end", timeout=120
            )  # type: ignore[misc]


def wait_reason(world: World, reason: str) -> None:
    """Wait until ConfigurationValid of run `kept` has this reason."""
    wait_for(
        lambda: world.condition("kept", "ConfigurationValid").get("reason"),
        lambda found: found == reason,
        f"kept is {reason}",
    )


def test_operator_follows_restored_etcd_without_restart(own_cluster: Cluster, tmp_path: Path) -> None:
    assert isinstance(own_cluster, NativeCluster)
    etcd = Etcd(own_cluster, tmp_path / "backup")
    with fake_nodes(own_cluster, 1, prefix="restored"), fresh_namespace(own_cluster) as namespace:
        world = World(own_cluster, namespace)
        own = {"RLRUN_WATCH_NAMESPACES": namespace, "POD_NAMESPACE": namespace}
        with OperatorProcess(own_cluster, tmp_path, **own) as operator:
            world.start("kept")
            world.start("deleted")
            etcd.save()
            operator.wait_ready()
            pid = operator.pid
            world.edit("kept", {"maxSteps": 500})
            wait_for(
                lambda: world.condition("kept", "ConfigurationValid"),
                lambda c: c.get("reason") == "ChangePending",
                "the edit is seen",
            )
            world.kube("DELETE", world.path("/apis/rlrun.io/v1alpha1", "rlruns", "deleted"))
            wait_for(lambda: world.pods("deleted"), lambda pods: not pods, "the deleted run's pods are gone")
            world.create("new")
            world.wait_phase("new", "Starting")
            for number in range(300):  # makes the lost history longer than the following one
                world.kube("POST", world.path("/api/v1", "configmaps"), {"metadata": {"name": f"filler-{number}"}})

            etcd.restore()
            wait_for(
                lambda: world.condition("kept", "ConfigurationValid"),
                lambda c: c.get("reason") == "Valid",
                "kept is as in the backup",
            )
            operator.wait_ready()
            for name in ("kept", "deleted"):
                world.edit(name, {"suspend": True})
                world.wait_phase(name, "Suspended")
            world.create("after")
            world.wait_phase("after", "Starting")
            assert world.kube.get(world.path("/apis/rlrun.io/v1alpha1", "rlruns", "new")) is None
            assert (operator.running, operator.pid) == (True, pid)
            operator.check_log()
