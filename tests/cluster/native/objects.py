"""The objects that make a bare API server a usable cluster: nodes, DNS, storage classes, one role."""

from typing import Any

from .pki import READER_GROUP
from .plan import CONTROL_PLANE, Plan

Object = dict[str, Any]
DNS_PORTS = [{"name": "dns", "port": 53, "protocol": "UDP"}, {"name": "dns-tcp", "port": 53, "protocol": "TCP"}]


def initial_objects(plan: Plan) -> list[Object]:
    """Return all objects in the order of creation."""
    objects = [*reader_role(), *storage_classes()]
    return [*objects, *dns(plan), *(node(plan, name) for name in plan.nodes)] if plan.nodes else objects


def node(plan: Plan, name: str) -> Object:
    """Return a node that exists before its kubelet starts, so that its pod range is known beforehand."""
    subnet = plan.pod_subnet(name)
    labels = {"kubernetes.io/hostname": name, "node-role.kubernetes.io/worker": "", "rlrun.io/real-node": "true"}
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "labels": labels},
        "spec": {"podCIDR": subnet, "podCIDRs": [subnet]},
    }


def dns(plan: Plan) -> list[Object]:
    """Return the Service `kube-dns`: CoreDNS is a process of the control plane, so its endpoint is written by hand."""
    meta = {"name": "kube-dns", "namespace": "kube-system"}
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": meta,
        "spec": {"clusterIP": plan.dns_service, "ports": DNS_PORTS},
    }
    slice_ = {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {**meta, "labels": {"kubernetes.io/service-name": "kube-dns"}},
        "addressType": "IPv4",
        "ports": DNS_PORTS,
        "endpoints": [{"addresses": [plan.address(CONTROL_PLANE)], "conditions": {"ready": True}}],
    }
    return [service, slice_]


def storage_classes() -> list[Object]:
    """Return `shared`, the default, which gives ReadWriteMany volumes, and `broken`, whose claims are never bound."""

    def storage_class(name: str, provisioner: str, annotations: dict[str, str]) -> Object:
        return {
            "apiVersion": "storage.k8s.io/v1",
            "kind": "StorageClass",
            "metadata": {"name": name, "annotations": annotations},
            "provisioner": provisioner,
        }

    default = {"storageclass.kubernetes.io/is-default-class": "true"}
    return [
        storage_class("shared", "kubernetes.io/host-path", default),
        storage_class("broken", "kubernetes.io/no-provisioner", {}),
    ]


def reader_role() -> list[Object]:
    """Return the role for the watches of CoreDNS and the policy enforcer."""
    name = "testcluster-reader"
    group = "rbac.authorization.k8s.io"
    verbs = ["get", "list", "watch"]
    rules = [
        {"apiGroups": [""], "resources": ["endpoints", "services", "pods", "namespaces"], "verbs": verbs},
        {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": verbs},
        {"apiGroups": ["networking.k8s.io"], "resources": ["networkpolicies"], "verbs": verbs},
    ]
    version = f"{group}/v1"
    role = {"apiVersion": version, "kind": "ClusterRole", "metadata": {"name": name}, "rules": rules}
    binding = {
        "apiVersion": version,
        "kind": "ClusterRoleBinding",
        "metadata": {"name": name},
        "roleRef": {"apiGroup": group, "kind": "ClusterRole", "name": name},
        "subjects": [{"apiGroup": group, "kind": "Group", "name": READER_GROUP}],
    }
    return [role, binding]


def collection(item: Object) -> str:
    """Return the API path under which an object of `initial_objects` is created."""
    version, namespace = item["apiVersion"], item["metadata"].get("namespace")
    root = "/api/v1" if version == "v1" else f"/apis/{version}"
    plural = item["kind"].lower() + ("es" if item["kind"].endswith("s") else "s")
    return f"{root}/namespaces/{namespace}/{plural}" if namespace else f"{root}/{plural}"
