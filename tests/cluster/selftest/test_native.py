"""Behavior of the native cluster: ordinary operation, faults, and complete removal."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cluster import Cluster, ClusterError, attach, down
from tests.cluster.cache import clusters_root
from tests.cluster.native.golden import SNAPSHOTTER
from tests.cluster.native.leftovers import left_since, leftovers, standing
from tests.cluster.selftest.conftest import IMAGE, NAME, make_image
from tests.support.waiting import wait_until

ROOT = Path(__file__).parents[3]

pytestmark = pytest.mark.full


def pod(name: str, node: str, command: str, *, labels: dict[str, str] | None = None, **spec: Any) -> dict[str, Any]:
    """Return a pod that Pod Security's level `restricted` admits."""
    container = {
        "name": "main",
        "image": IMAGE,
        "imagePullPolicy": "Never",
        "command": ["sh", "-c", command],
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        **spec.pop("container", {}),
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": {"app": name, **(labels or {})}},
        "spec": {
            "nodeName": node,
            "terminationGracePeriodSeconds": 0,
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": 1000,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [container],
            **spec,
        },
    }


def apply(cluster: Cluster, *items: dict[str, Any]) -> None:
    cluster.kubectl("apply", "-f", "-", stdin=json.dumps({"apiVersion": "v1", "kind": "List", "items": items}))


def wait_ready(cluster: Cluster, *pods: str) -> None:
    path = "{.status.conditions[?(@.type=='Ready')].status}"

    def are_ready() -> bool:
        return all(cluster.kubectl("get", "pod", name, "-o", f"jsonpath={path}") == "True" for name in pods)

    def versions() -> str:
        columns = "custom-columns=NAME:.metadata.name,VERSION:.metadata.resourceVersion"
        return cluster.kubectl("get", "pods,events", "-o", columns)

    def state() -> str:
        return cluster.kubectl("get", "pods,events", "-o", "wide")

    wait_until(are_ready, f"pods {', '.join(pods)} are Ready", progress=versions, state=state, poll_seconds=0.25)


def run_in_pod(cluster: Cluster, name: str, command: str) -> str:
    """Return the output of a shell command in a pod; the output of a failed command is useless."""
    return cluster.kubectl("exec", name, "--", "sh", "-c", command, check=False)


def node_state(cluster: Cluster, node: str) -> str:
    path = "jsonpath={.status.conditions[?(@.type=='Ready')].status}"
    return cluster.kubectl("get", "node", node, "-o", path)


def until_node(cluster: Cluster, node: str, condition: Callable[[str], bool]) -> None:
    wait_until(
        lambda: condition(node_state(cluster, node)),
        f"node {node}",
        state=lambda: cluster.kubectl("describe", "node", node),
        poll_seconds=0.3,
    )


@pytest.fixture(scope="module")
def pair(cluster: Cluster) -> Cluster:
    """Pods `a` on n0 and `b` on n1 that share a volume; `b` serves /mark over HTTP behind the Service `web`."""
    claim = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": "data"},
        "spec": {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}},
    }
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "web"},
        "spec": {"selector": {"app": "b"}, "ports": [{"name": "http", "port": 8080}]},
    }
    mount = {"volumeMounts": [{"name": "data", "mountPath": "/data"}]}
    volumes = [{"name": "data", "persistentVolumeClaim": {"claimName": "data"}}]
    ports = {"ports": [{"name": "http", "containerPort": 8080}]}
    serve = "httpd -p 8080 -h /; echo serving; exec sleep 1000"
    apply(
        cluster,
        claim,
        service,
        pod("a", "n0", "exec sleep 1000", volumes=volumes, container=mount),
        pod("b", "n1", serve, volumes=volumes, container={**mount, **ports}),
    )
    wait_ready(cluster, "a", "b")
    return cluster


def fetch(cluster: Cluster) -> str:
    """Return the answer of pod `b` to pod `a` through the Service; empty without an answer within a second.

    The request uses the address and nc, because this busybox cannot load the C library's resolver. nslookup contacts
    the server itself.
    """
    address = cluster.kubectl("get", "service", "web", "-o", "jsonpath={.spec.clusterIP}")
    request = f"printf 'GET /mark HTTP/1.0\\r\\n\\r\\n' | nc -w 1 {address} 8080"
    return run_in_pod(cluster, "a", request).rpartition("\n\n")[2].strip()


def test_logs_and_exec(pair: Cluster) -> None:
    assert pair.kubectl("logs", "b") == "serving\n"
    assert run_in_pod(pair, "a", "id -u") == "1000\n"


def test_cluster_dns_resolves_only_cluster_names(pair: Cluster) -> None:
    address = pair.kubectl("get", "service", "web", "-o", "jsonpath={.spec.clusterIP}")
    assert address in run_in_pod(pair, "a", "nslookup web.default.svc.cluster.local")
    assert "NXDOMAIN" in run_in_pod(pair, "a", "nslookup huggingface.co 2>&1")


def test_volume_is_shared_across_nodes_without_root(pair: Cluster) -> None:
    run_in_pod(pair, "a", "echo from a > /data/file")
    assert run_in_pod(pair, "b", "cat /data/file; echo from b >> /data/file") == "from a\n"
    assert run_in_pod(pair, "a", "tail -n 1 /data/file") == "from b\n"


def test_claim_of_class_broken_stays_unbound(cluster: Cluster) -> None:
    claim = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": "never"},
        "spec": {
            "storageClassName": "broken",
            "accessModes": ["ReadWriteMany"],
            "resources": {"requests": {"storage": "1Gi"}},
        },
    }
    apply(cluster, claim)
    wait_until(
        lambda: "ProvisioningFailed" in cluster.kubectl("describe", "pvc", "never") or _phase(cluster) == "Pending",
        "the claim to be seen",
    )
    assert _phase(cluster) == "Pending"
    cluster.kubectl("delete", "pvc", "never")


def _phase(cluster: Cluster) -> str:
    return cluster.kubectl("get", "pvc", "never", "-o", "jsonpath={.status.phase}")


def test_pod_security_refuses_unrestricted_pod(cluster: Cluster) -> None:
    cluster.kubectl("create", "namespace", "strict")
    cluster.kubectl("label", "namespace", "strict", "pod-security.kubernetes.io/enforce=restricted")
    cluster.kubectl("-n", "strict", "apply", "--dry-run=server", "-f", "-", stdin=json.dumps(pod("c", "n0", "true")))
    loose = pod("c", "n0", "true", securityContext={})
    with pytest.raises(ClusterError, match=r'violates PodSecurity "restricted:latest".*runAsNonRoot'):
        cluster.kubectl("-n", "strict", "apply", "--dry-run=server", "-f", "-", stdin=json.dumps(loose))


def policy(name: str, **spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": name},
        "spec": spec,
    }


def test_network_policies_deny_and_allow(pair: Cluster) -> None:
    def comes(expected: str) -> None:
        wait_until(lambda: fetch(pair) == expected, f"{expected!r} from b", poll_seconds=0.1)

    comes("one")
    apply(pair, policy("deny", podSelector={"matchLabels": {"app": "b"}}, policyTypes=["Ingress"]))
    comes("")
    caller = {"from": [{"podSelector": {"matchLabels": {"app": "a"}}}], "ports": [{"port": "http"}]}
    apply(pair, policy("allow", podSelector={"matchLabels": {"app": "b"}}, ingress=[caller]))
    comes("one")
    dns = {
        "to": [{"namespaceSelector": {}, "podSelector": {"matchLabels": {"k8s-app": "kube-dns"}}}],
        "ports": [{"port": 53, "protocol": "UDP"}],
    }
    apply(pair, policy("dns", podSelector={"matchLabels": {"app": "a"}}, policyTypes=["Egress"], egress=[dns]))
    comes("")  # names resolve, connections fail
    assert "Address" in run_in_pod(pair, "a", "nslookup web.default.svc.cluster.local")
    pair.kubectl("delete", "networkpolicy", "deny", "allow", "dns")
    comes("one")


def test_fake_nodes_run_fake_pods_next_to_real_nodes(cluster: Cluster) -> None:
    names = cluster.add_fake_nodes(3, gpus=8, labels={"pool": "fake"})
    assert names == ("fake-0", "fake-1", "fake-2")
    size = cluster.kubectl("get", "nodes", "-l", "pool=fake", "-o", "jsonpath={.items[*].status.allocatable}")
    assert size.count('"nvidia.com/gpu":"8"') == 3
    toleration = [{"key": "kwok.x-k8s.io/node", "operator": "Exists"}]
    gpus: dict[str, Any] = {"container": {"resources": {"limits": {"nvidia.com/gpu": "8"}}}}
    fake = pod("fake", "", "exit 1", tolerations=toleration, **gpus)
    del fake["spec"]["nodeName"]
    apply(cluster, fake)
    wait_ready(cluster, "fake")
    cluster.kubectl("delete", "pod", "fake")


def test_real_node_offers_fake_gpus(cluster: Cluster) -> None:
    cluster.fake_gpus("n0", 2)
    item = pod("gpu", "", "exec sleep 1000", container={"resources": {"limits": {"nvidia.com/gpu": "2"}}})
    del item["spec"]["nodeName"]
    apply(cluster, item)
    wait_ready(cluster, "gpu")
    assert cluster.kubectl("get", "pod", "gpu", "-o", "jsonpath={.spec.nodeName}") == "n0"
    cluster.kubectl("delete", "pod", "gpu")


def test_reloaded_image_replaces_previous_build(cluster: Cluster, tmp_path: Path) -> None:
    cluster.load_image(make_image(tmp_path / "two.tar", "two"))
    apply(cluster, pod("new-0", "n0", "cat /mark; sleep 1000"), pod("new-1", "n1", "cat /mark; sleep 1000"))
    wait_ready(cluster, "new-0", "new-1")
    assert [cluster.kubectl("logs", name) for name in ("new-0", "new-1")] == ["two\n", "two\n"]
    cluster.kubectl("delete", "pod", "new-0", "new-1")
    layers = clusters_root() / NAME / "n0/lib/containerd" / SNAPSHOTTER / "snapshots"
    assert [link.name for link in layers.iterdir() if not link.exists()] == [], "layers of the old build are in use"


def test_writes_are_audited(cluster: Cluster) -> None:
    cluster.kubectl("create", "configmap", "audited")

    def seen() -> list[str]:
        lines = map(json.loads, cluster.audit_log.read_text().splitlines())
        return [line["verb"] for line in lines if line["objectRef"].get("name") == "audited"]

    wait_until(lambda: seen() == ["create"], "the audit record", state=lambda: str(seen()))


def test_api_server_can_be_stopped_and_frozen(pair: Cluster) -> None:
    server = pair.api_server
    server.stop()
    with pytest.raises(ClusterError, match="refused"):
        pair.kubectl("get", "nodes", timeout=60)
    server.start()
    server.freeze()
    with pytest.raises(ClusterError, match="did not end within 1 s"):
        pair.kubectl("get", "nodes", timeout=1)
    server.thaw()
    assert "Running" in pair.kubectl("get", "pod", "a")


def test_isolated_nodes_stay_ready_without_connection(pair: Cluster) -> None:
    for node in pair.nodes:
        pair.isolate(node)
    assert fetch(pair) == ""
    assert [node_state(pair, node) for node in pair.nodes] == ["True", "True"]
    for node in pair.nodes:
        pair.join(node)
    wait_until(lambda: fetch(pair) in ("one", "two"), "an answer over the joined network")


def test_unplugged_frozen_and_dead_nodes_recover(pair: Cluster) -> None:
    """Frozen and unplugged nodes are tested together: one after the other would take three times the detection time."""
    pair.freeze("n0")
    pair.unplug("n1")
    until_node(pair, "n0", lambda state: state == "Unknown")
    until_node(pair, "n1", lambda state: state == "Unknown")
    pair.thaw("n0")
    pair.plug("n1")
    until_node(pair, "n0", lambda state: state == "True")
    until_node(pair, "n1", lambda state: state == "True")
    pair.power_off("n1")
    with pytest.raises(ClusterError, match="machine n1 of cluster selftest is off"):
        pair.sh("n1", "true")
    pair.power_on("n1")
    assert pair.sh("n1", "hostname") == "n1\n"
    heartbeat = "jsonpath={.status.nodeInfo.bootID} {.status.conditions[?(@.type=='Ready')].lastHeartbeatTime}"
    before = pair.kubectl("get", "node", "n1", "-o", heartbeat)
    until_node(
        pair, "n1", lambda state: state == "True" and pair.kubectl("get", "node", "n1", "-o", heartbeat) != before
    )
    apply(pair, pod("after", "n1", "exec sleep 1000"))
    wait_ready(pair, "after")


def test_tied_cluster_ends_with_its_starter(cluster: Cluster) -> None:
    """Two clusters run at the same time. After a kill of its starter, all processes of the tied cluster are gone."""
    name = "selftest-2"
    down(name)
    before = standing()
    command = ["-m", "tests.cluster", "up", "--name", name, "--nodes", "0", "--provider", "native", "--tie"]
    starter = subprocess.Popen(
        [sys.executable, *command], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert starter.stdout is not None
    try:
        lines = list(iter(starter.stdout.readline, "It ends with this command: press Ctrl-C.\n"))
        second = attach(name)
        assert f"export KUBECONFIG={second.kubeconfig}\n" in lines
        assert second.kubectl("get", "namespace", "default")
        assert not second.nodes
    finally:
        starter.send_signal(signal.SIGKILL)
        starter.communicate()
    wait_until(
        lambda: not [line for line in leftovers(name) if line.startswith(("process", "network"))],
        "the tied cluster to end",
        state=lambda: "\n".join(leftovers(name)),
    )
    assert set(leftovers(name)) < set(left_since({})), "remains of the other cluster count too"
    assert left_since(before) == left_since(before | {name: 0}) == leftovers(name) != [], "one brought up since counts"
    assert left_since(standing()) == [], "whatever stood before is not this run's"
    assert down(name)
    assert leftovers(name) == left_since(before) == []
    assert "True" in node_state(cluster, "n0")


def test_down_removes_everything(cluster: Cluster) -> None:
    """This is the last test of the file, because it ends the shared cluster."""
    assert leftovers(NAME)
    start = time.monotonic()
    assert down(NAME)
    assert time.monotonic() - start < 60
    assert leftovers(NAME) == []
    assert not down(NAME)
