"""Kinds of objects that the operator reads or writes, and their paths in the Kubernetes API."""

from __future__ import annotations

from dataclasses import dataclass

from rlrun_operator.names import GROUP, KIND, PLURAL, VERSION


@dataclass(frozen=True)
class Resource:
    """One kind of Kubernetes object."""

    kind: str
    group: str
    """Empty: the core group."""
    version: str
    plural: str
    namespaced: bool = True

    @property
    def api_version(self) -> str:
        """API version, in the form of manifests."""
        return f"{self.group}/{self.version}" if self.group else self.version

    def path(self, namespace: str | None = None, name: str | None = None, subresource: str | None = None) -> str:
        """Return the path on the API server; without a namespace it covers all namespaces."""
        parts = ["apis", self.group, self.version] if self.group else ["api", self.version]
        if namespace is not None and self.namespaced:
            parts += ["namespaces", namespace]
        parts.append(self.plural)
        parts += [part for part in (name, subresource) if part]
        return "/" + "/".join(parts)


RLRUN = Resource(KIND, GROUP, VERSION, PLURAL)
POD = Resource("Pod", "", "v1", "pods")
STATEFUL_SET = Resource("StatefulSet", "apps", "v1", "statefulsets")
DEPLOYMENT = Resource("Deployment", "apps", "v1", "deployments")
CLAIM = Resource("PersistentVolumeClaim", "", "v1", "persistentvolumeclaims")
LEASE = Resource("Lease", "coordination.k8s.io", "v1", "leases")
EVENT = Resource("Event", "", "v1", "events")
NODE = Resource("Node", "", "v1", "nodes", namespaced=False)

QUOTA = Resource("ResourceQuota", "", "v1", "resourcequotas")

PARTS = (
    Resource("Service", "", "v1", "services"),
    Resource("ConfigMap", "", "v1", "configmaps"),
    Resource("ServiceAccount", "", "v1", "serviceaccounts"),
    Resource("Role", "rbac.authorization.k8s.io", "v1", "roles"),
    Resource("RoleBinding", "rbac.authorization.k8s.io", "v1", "rolebindings"),
    Resource("PodDisruptionBudget", "policy", "v1", "poddisruptionbudgets"),
    Resource("NetworkPolicy", "networking.k8s.io", "v1", "networkpolicies"),
)
"""Kinds of a run's objects in addition to its workloads. Only their metadata are watched: those show deletions and edits."""
PART_KINDS = frozenset(resource.kind for resource in PARTS)

EDITABLE_KINDS = frozenset({POD.kind, STATEFUL_SET.kind, DEPLOYMENT.kind})
"""Kinds of workloads; edits of them by other clients are reported with their values."""

WATCHED = (RLRUN, POD, STATEFUL_SET, DEPLOYMENT, CLAIM, LEASE, *PARTS)
"""Resources that the watches copy into the store."""

WORKLOAD = Resource("Workload", "kueue.x-k8s.io", "v1beta2", "workloads")
"""Kueue's object for a run in one of its queues."""
FLAVOR = Resource("ResourceFlavor", "kueue.x-k8s.io", "v1beta2", "resourceflavors", namespaced=False)
WORKLOAD_PRIORITY_CLASS = Resource(
    "WorkloadPriorityClass", "kueue.x-k8s.io", "v1beta2", "workloadpriorityclasses", namespaced=False
)
POD_GROUP = Resource("PodGroup", "scheduling.volcano.sh", "v1beta1", "podgroups")
"""Volcano's object for a run in one of its queues."""
VOLCANO_QUEUE = Resource("Queue", "scheduling.volcano.sh", "v1beta1", "queues", namespaced=False)
PRIORITY_CLASS = Resource("PriorityClass", "scheduling.k8s.io", "v1", "priorityclasses", namespaced=False)

SECRET = Resource("Secret", "", "v1", "secrets")
"""Created and never read, so that an attacker who controls the operator cannot read keys."""
BY_KIND = {resource.kind: resource for resource in (*WATCHED, EVENT, NODE, QUOTA, SECRET, WORKLOAD, POD_GROUP)}
