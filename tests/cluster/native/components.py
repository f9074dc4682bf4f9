"""The daemons of the control plane and of a node: their command lines and configuration files, as values.

Each flag with a hidden reason has a comment. Paths are those inside the machine, where /run and /var/lib are the
machine's own and the cluster's state folder has the same path as outside.
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path

from .plan import CONTROL_PLANE, Plan
from .spec import Daemon
from .state import State

PAUSE_IMAGE = "localhost/rlrun-pause:1"
CNI_BIN = "/usr/lib/cni"
REPOSITORY = Path(__file__).resolve().parents[3]
FAILURE_TOLERATION_S = 5  # time for which a pod stays bound to a node that is down; Kubernetes' default is 300
NODE_GRACE_S = 16  # time without a heartbeat after which a node is down; the default is 50
FAKE_NODE_GRACE_S = 120  # without real nodes none dies: kwok renews every 10 s, and later on a busy machine
NODE_STATUS_PERIOD_S = 4
NODE_LEASE_S = 8
FAKE_NODE_LEASE_S = 40

# One line for each write request (user, object, user agent), which tests and benchmarks count. Reads, node heartbeats
# and access reviews are left out.
AUDIT_POLICY = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived"],
    "rules": [
        {"level": "None", "verbs": ["get", "list", "watch"]},
        {"level": "None", "resources": [{"group": "authentication.k8s.io"}, {"group": "authorization.k8s.io"}]},
        {"level": "None", "namespaces": ["kube-node-lease"], "resources": [{"group": "coordination.k8s.io"}]},
        {"level": "Metadata"},
    ],
}


def control_plane(plan: Plan, state: State, bins: Mapping[str, Path], *, kwok: bool) -> tuple[Daemon, ...]:
    """Return etcd, API server, controller-manager, scheduler; CoreDNS if there are nodes; kwok for fake nodes."""
    daemons = [_etcd(state, bins), _apiserver(plan, state, bins), *_controllers(plan, state, bins)]
    after = str(state.api_ready)
    if plan.nodes:
        daemons.append(Daemon("coredns", (str(bins["coredns"]), "-conf", "/run/Corefile"), after))
    if kwok:
        daemons.append(
            Daemon(
                "kwok",
                (
                    str(bins["kwok"]),
                    f"--kubeconfig={state.credentials}/admin.kubeconfig",
                    "--config=/dev/null",  # the built-in stages, not a file in the user's home folder
                    "--manage-nodes-with-annotation-selector=kwok.x-k8s.io/node=fake",
                    f"--cidr={plan.fake_pod_range}",
                    f"--node-ip={plan.address(CONTROL_PLANE)}",
                    f"--node-lease-duration-seconds={FAKE_NODE_LEASE_S}",
                ),
                after,
            )
        )
    return tuple(daemons)


def control_plane_files(plan: Plan, state: State) -> dict[str, str]:
    """Return CoreDNS' configuration and the audit policy."""
    zones = "cluster.local:53 in-addr.arpa:53 ip6.arpa:53"
    bind = f"bind {plan.address(CONTROL_PLANE)}"
    corefile = f"""\
{zones} {{
 {bind}
 errors
 ready 127.0.0.1:8181
 cache {{
  success 5000 5
  denial 5000 1
 }}
 kubernetes cluster.local in-addr.arpa ip6.arpa {{
  kubeconfig {state.credentials}/reader.kubeconfig
  pods insecure
  ttl 5
 }}
}}
.:53 {{
 {bind}
 template IN ANY . {{
  rcode NXDOMAIN
 }}
}}
"""
    return {"/run/Corefile": corefile, "/run/audit-policy.json": json.dumps(AUDIT_POLICY)}


def _etcd(state: State, bins: Mapping[str, Path]) -> Daemon:
    client, peer = "http://127.0.0.1:2379", "http://127.0.0.1:2380"
    return Daemon(
        "etcd",
        (
            str(bins["etcd"]),
            "--name=test",
            "--data-dir=/var/lib/etcd",
            f"--listen-client-urls={client}",
            f"--advertise-client-urls={client}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=test={peer}",
            "--unsafe-no-fsync",  # a test cluster's data is not needed after a power cut
        ),
    )


def _apiserver(plan: Plan, state: State, bins: Mapping[str, Path]) -> Daemon:
    pki = state.credentials
    return Daemon(
        "kube-apiserver",
        (
            str(bins["kube-apiserver"]),
            "--etcd-servers=http://127.0.0.1:2379",
            "--secure-port=6443",
            f"--advertise-address={plan.address(CONTROL_PLANE)}",
            f"--client-ca-file={pki}/ca.crt",
            f"--tls-cert-file={pki}/apiserver.crt",
            f"--tls-private-key-file={pki}/apiserver.key",
            f"--service-account-key-file={pki}/service-account.pub",
            f"--service-account-signing-key-file={pki}/service-account.key",
            "--service-account-issuer=https://kubernetes.default.svc.cluster.local",
            f"--service-cluster-ip-range={plan.service_range}",
            "--authorization-mode=Node,RBAC",
            "--enable-admission-plugins=NodeRestriction",
            "--allow-privileged=true",
            f"--kubelet-client-certificate={pki}/kubelet-client.crt",
            f"--kubelet-client-key={pki}/kubelet-client.key",
            f"--kubelet-certificate-authority={pki}/ca.crt",
            "--kubelet-preferred-address-types=InternalIP",  # the nodes' names are never resolved
            f"--default-not-ready-toleration-seconds={FAILURE_TOLERATION_S}",
            f"--default-unreachable-toleration-seconds={FAILURE_TOLERATION_S}",
            "--audit-policy-file=/run/audit-policy.json",
            "--audit-log-path=/var/log/audit.log",
        ),
    )


def _controllers(plan: Plan, state: State, bins: Mapping[str, Path]) -> tuple[Daemon, Daemon]:
    pki, after = state.credentials, str(state.api_ready)

    def common(user: str) -> tuple[str, ...]:
        config = f"{pki}/{user}.kubeconfig"
        return (
            *(f"--{purpose}kubeconfig={config}" for purpose in ("", "authentication-", "authorization-")),
            "--leader-elect=false",
            "--bind-address=127.0.0.1",
            "--cert-dir=/run",
            "--kube-api-qps=200",
            "--kube-api-burst=400",
        )

    controller_manager = (
        str(bins["kube-controller-manager"]),
        *common("controller-manager"),
        f"--service-account-private-key-file={pki}/service-account.key",
        f"--root-ca-file={pki}/ca.crt",
        f"--cluster-signing-cert-file={pki}/ca.crt",
        f"--cluster-signing-key-file={pki}/ca.key",
        "--use-service-account-credentials=true",
        f"--service-cluster-ip-range={plan.service_range}",
        "--enable-hostpath-provisioner=true",
        "--node-monitor-period=2s",
        f"--node-monitor-grace-period={NODE_GRACE_S if plan.nodes else FAKE_NODE_GRACE_S}s",
        "--node-startup-grace-period=60s",
    )
    scheduler = (str(bins["kube-scheduler"]), *common("scheduler"))
    return Daemon("kube-controller-manager", controller_manager, after), Daemon("kube-scheduler", scheduler, after)


def node(plan: Plan, state: State, name: str, bins: Mapping[str, Path]) -> tuple[Daemon, ...]:
    """Return containerd, kubelet, kube-proxy and the enforcer of network policies."""
    after = str(state.api_ready)
    kubelet = (
        str(bins["kubelet"]),
        "--config=/run/kubelet.json",
        f"--kubeconfig={state.credentials}/node-{name}.kubeconfig",
        f"--hostname-override={name}",
        f"--node-ip={plan.address(name)}",
    )
    proxy = (str(bins["kube-proxy"]), "--config=/run/proxy.json", f"--hostname-override={name}")
    enforcer = (
        *(sys.executable, "-S", "-m", "tests.cluster.native.enforcer"),
        f"{state.credentials}/reader.kubeconfig",
        plan.pod_range,
        plan.address(CONTROL_PLANE),
    )
    return (
        Daemon("containerd", ("containerd", "--config", "/run/containerd.toml")),
        Daemon("kubelet", kubelet, after),
        Daemon("kube-proxy", proxy, after),
        Daemon("network-policy", enforcer, after, {"PYTHONPATH": str(REPOSITORY), "PYTHONDONTWRITEBYTECODE": "1"}),
    )


def node_files(plan: Plan, state: State, name: str) -> dict[str, str]:
    """Return the configuration of containerd, the pod network, the kubelet and kube-proxy."""
    return {
        "/run/containerd.toml": containerd_config("/var/lib/containerd", cri=True),
        "/run/cni/10-pods.conflist": json.dumps(_pod_network(plan.pod_subnet(name))),
        "/run/resolv.conf": f"nameserver {plan.dns_service}\n",
        "/run/kubelet.json": json.dumps(_kubelet(plan, state, name), indent=1),
        "/run/proxy.json": json.dumps(_proxy(plan, state, name), indent=1),
    }


def containerd_config(root: str, *, cri: bool) -> str:
    """Return containerd's configuration for a node, or without its Kubernetes part for imports of images."""
    kinds = ["snapshotter.v1.btrfs", "snapshotter.v1.zfs", "snapshotter.v1.devmapper", "snapshotter.v1.aufs"]
    disabled = [*kinds, "internal.v1.opt", "tracing.processor.v1.otlp", *([] if cri else ["grpc.v1.cri"])]
    head = f"""\
version = 2
root = "{root}"
state = "/run/containerd"
oom_score = 0
disabled_plugins = {json.dumps([f"io.containerd.{kind}" for kind in disabled])}
"""
    if not cri:
        return head
    section = 'plugins."io.containerd.grpc.v1.cri"'
    # restrict_oom_score_adj: without CAP_SYS_RESOURCE a sandbox cannot lower its score, and would not start.
    return f"""{head}[{section}]
  sandbox_image = "{PAUSE_IMAGE}"
  disable_apparmor = true
  restrict_oom_score_adj = true
  stream_server_address = "127.0.0.1"
  [{section}.containerd]
    snapshotter = "overlayfs"
    default_runtime_name = "runc"
    [{section}.containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
      [{section}.containerd.runtimes.runc.options]
        SystemdCgroup = false
  [{section}.cni]
    bin_dir = "{CNI_BIN}"
    conf_dir = "/run/cni"
"""


def _pod_network(subnet: str) -> dict[str, object]:
    ipam = {
        "type": "host-local",
        "dataDir": "/run/cni-addresses",
        "ranges": [[{"subnet": subnet}]],
        "routes": [{"dst": "0.0.0.0/0"}],
    }
    bridge = {"type": "bridge", "bridge": "cni0", "isGateway": True, "hairpinMode": True, "mtu": 1500, "ipam": ipam}
    portmap = {"type": "portmap", "capabilities": {"portMappings": True}}
    return {"cniVersion": "1.0.0", "name": "pods", "plugins": [bridge, portmap]}


def _kubelet(plan: Plan, state: State, name: str) -> dict[str, object]:
    pki = state.credentials
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": f"{pki}/ca.crt"},
        },
        "authorization": {"mode": "Webhook"},
        "tlsCertFile": f"{pki}/kubelet-{name}.crt",
        "tlsPrivateKeyFile": f"{pki}/kubelet-{name}.key",
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": f"/{plan.cgroup}/{name}",
        "failCgroupV1": False,
        "failSwapOn": False,
        "containerRuntimeEndpoint": "unix:///run/containerd/containerd.sock",
        "clusterDNS": [plan.dns_service],
        "clusterDomain": "cluster.local",
        "resolvConf": "/run/resolv.conf",  # without the host's search domains
        "volumePluginDir": "/var/lib/kubelet/volume-plugins",
        "evictionHard": {
            "memory.available": "100Mi",
            "nodefs.available": "0%",
            "nodefs.inodesFree": "0%",
            "imagefs.available": "0%",
            "imagefs.inodesFree": "0%",
        },
        "imageGCHighThresholdPercent": 100,  # a collected image could not be pulled again
        "makeIPTablesUtilChains": False,
        "serializeImagePulls": False,
        "nodeStatusUpdateFrequency": f"{NODE_STATUS_PERIOD_S}s",
        "nodeLeaseDurationSeconds": NODE_LEASE_S,
        "kubeAPIQPS": 100,
        "kubeAPIBurst": 200,
    }


def _proxy(plan: Plan, state: State, name: str) -> dict[str, object]:
    return {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "mode": "nftables",
        "clusterCIDR": plan.pod_range,
        "clientConnection": {"kubeconfig": f"{state.credentials}/proxy.kubeconfig"},
        "conntrack": {"maxPerCore": 0, "min": 0},
        "bindAddress": plan.address(name),  # otherwise it waits 30 s for its Node
        "metricsBindAddress": "127.0.0.1:10249",
        "healthzBindAddress": "127.0.0.1:10256",
    }
