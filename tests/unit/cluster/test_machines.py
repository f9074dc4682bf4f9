"""Plans of machines and their daemons, and simulated kwok nodes."""

import json
from pathlib import Path

import pytest

from tests.cluster import ClusterError
from tests.cluster.base import Cluster, fake_node
from tests.cluster.binaries import TOOLS
from tests.cluster.native import components, spec
from tests.cluster.native.objects import collection, initial_objects
from tests.cluster.native.plan import Plan
from tests.cluster.native.state import State

PLAN = Plan("demo", 77, ("n0", "n1"))
BARE = Plan("bare", 78, ())
BINS = {command: Path("/bin-of", command) for tool in TOOLS.values() for command in tool.commands}


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RLRUN_CACHE", str(tmp_path))


def list_daemons(plan: Plan, *, kwok: bool = True) -> list[str]:
    return [daemon.name for daemon in components.control_plane(plan, State(plan.name), BINS, kwok=kwok)]


def test_control_plane_without_nodes_starts_no_dns() -> None:
    core = ["etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler"]
    assert list_daemons(PLAN) == [*core, "coredns", "kwok"]
    assert list_daemons(BARE, kwok=False) == core
    assert {item["kind"] for item in initial_objects(BARE)} == {"StorageClass", "ClusterRole", "ClusterRoleBinding"}


def test_api_server_clients_wait_for_it() -> None:
    state = State("demo")
    daemons = (*components.control_plane(PLAN, state, BINS, kwok=True), *components.node(PLAN, state, "n0", BINS))
    assert {daemon.name for daemon in daemons if not daemon.after} == {"etcd", "kube-apiserver", "containerd"}


def test_kwok_node_grace_period_exceeds_lease_duration() -> None:
    """A node without a heartbeat for its grace period loses its pods, and kwok renews every quarter of the Lease duration."""
    for plan in (PLAN, BARE):
        daemons = components.control_plane(plan, State(plan.name), BINS, kwok=True)
        (manager,) = [daemon.argv for daemon in daemons if daemon.name == "kube-controller-manager"]
        (grace,) = [int(word.partition("=")[2][:-1]) for word in manager if word.startswith("--node-monitor-grace")]
        assert (grace > 2 * components.FAKE_NODE_LEASE_S) == (plan is BARE), (
            "real nodes are killed by tests, and missed soon"
        )


def test_node_has_routes_only_to_other_nodes() -> None:
    made = spec.machine(PLAN, State("demo"), "n0", keep=(), files={}, daemons=())
    assert [line for line in made.ip_linked if "10.77.12" in line] == ["route add 10.77.129.0/24 via 10.77.0.11"]


def test_node_masks_kernel_settings_of_host() -> None:
    node = spec.machine(PLAN, State("demo"), "n0", keep=(), files={}, daemons=())
    assert node.masks["/proc/sys/vm/overcommit_memory"] == "1"
    assert json.loads(node.json())["masks"] == node.masks


def test_objects_go_to_their_collections() -> None:
    paths = {collection(item) for item in initial_objects(PLAN)}
    assert {
        "/api/v1/nodes",
        "/api/v1/namespaces/kube-system/services",
        "/apis/discovery.k8s.io/v1/namespaces/kube-system/endpointslices",
        "/apis/storage.k8s.io/v1/storageclasses",
    } <= paths


def test_fake_nodes_are_tainted_only_if_requested() -> None:
    assert fake_node("f", 8, {"pool": "x"}, tainted=False)["spec"] == {"taints": []}
    tainted = fake_node("f", 8, {"pool": "x"}, tainted=True)
    assert tainted["spec"] == {"taints": [{"key": "kwok.x-k8s.io/node", "value": "fake", "effect": "NoSchedule"}]}
    assert "nvidia.com/gpu" not in json.dumps(fake_node("f", 0, {}, tainted=False))


def test_faults_need_a_native_cluster(tmp_path: Path) -> None:
    cluster = Cluster("given", tmp_path / "kubeconfig", tmp_path, ())
    with pytest.raises(ClusterError, match="power_off: only a native cluster can do this"):
        cluster.power_off("n0")
