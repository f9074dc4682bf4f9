"""Manifests that the policy allows and refuses, shared by tests of the operator and of the API server."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rlrun_operator.restrictions import RunPolicy

NAMESPACE, RUN = "team-a", "run"
SAYS = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
"""Security context that every user container must set."""
LISTS = RunPolicy(
    service_accounts=("trainer-identity", "team-*"),
    claims=("data", "shared-*"),
    secrets=("for-rlrun-*", "registry"),
    images=("registry.example.com/team/*", "docker.io/library/busybox:1"),
    priority_classes=("batch-*",),
    annotations=("prometheus.io/*", "team.example.com/owner"),
)
DEFAULTS = RunPolicy()
ANY = RunPolicy(pod_template="Any", images=("registry.example.com/team/*",))
CONTAINER = RunPolicy.model_validate({"environmentIsolation": "Container"})
"""Policy that runs environments and `dataset` rewards in a container without the run's key."""
EVERYTHING = RunPolicy(pod_template="Any", service_accounts=("*",), secrets=("*",), priority_classes=("*",))


@dataclass(frozen=True)
class Case:
    """A specification and the paths that its refusal reports. Without paths it is allowed."""

    name: str
    spec: dict[str, Any]
    refused: tuple[str, ...] = ()
    policy: RunPolicy = field(default=DEFAULTS)


def pod(role: str = "trainer", /, **spec: Any) -> dict[str, Any]:
    """A specification with a `podTemplate` of this spec."""
    return {role: {"podTemplate": {"spec": spec}}}


def meta(**fields: Any) -> dict[str, Any]:
    """A specification with a `podTemplate` of this metadata."""
    return {"trainer": {"podTemplate": {"metadata": fields}}}


def container(**fields: Any) -> dict[str, Any]:
    """A specification that patches the trainer's own container."""
    return pod(containers=[{"name": "trainer", **fields}])


def sidecar(kind: str = "containers", /, **fields: Any) -> dict[str, Any]:
    """A specification with a user container in the trainer's pods."""
    return pod(**{kind: [{"name": "side", "image": "busybox", "securityContext": SAYS, **fields}]})


def volume(**source: Any) -> dict[str, Any]:
    """A specification with a user volume in the trainer's pods."""
    return pod(volumes=[{"name": "extra", **source}])


T = "trainer.podTemplate"
S = f"{T}.spec"
C = f"{S}.containers[0]"
V = f"{S}.volumes[0]"
CS, PS, M = f"{C}.securityContext", f"{S}.securityContext", f"{T}.metadata"
SECRET = {"secretKeyRef": {"name": "db", "key": "password"}}
PROJECTED = {"sources": [{"configMap": {"name": "c"}}, {"secret": {"name": "for-rlrun-hub"}}]}
TOKEN = {"sources": [{"serviceAccountToken": {"path": "token"}}]}

ALLOWED = [
    Case("nothing", {}),
    Case("empty-template", {"trainer": {"podTemplate": {}}}),
    Case(
        "placement",
        pod(
            nodeSelector={"a": "b"},
            tolerations=[{"operator": "Exists"}],
            affinity={"nodeAffinity": {}},
            topologySpreadConstraints=[],
            schedulerName="volcano",
            runtimeClassName="nvidia",
            terminationGracePeriodSeconds=120,
        ),
    ),
    Case("labels", meta(labels={"team": "a", "example.com/cost": "1"})),
    Case("annotation", meta(annotations={"prometheus.io/scrape": "true"})),
    Case("resources", container(resources={"limits": {"memory": "1Gi"}}, workingDir="/tmp", command=["a"], args=["b"])),
    Case("variables", container(env=[{"name": "A", "value": "1"}, {"name": "B", "valueFrom": {"fieldRef": {}}}])),
    Case("secret-by-convention", {"trainer": {"envFrom": [{"secretRef": {"name": "for-rlrun-hub"}}]}}),
    Case("config-map-of-variables", {"trainer": {"envFrom": [{"configMapRef": {"name": "any"}}]}}),
    Case("volumes", pod(volumes=[{"name": "a", "emptyDir": {}}, {"name": "b", "configMap": {"name": "c"}}])),
    Case("projected", volume(projected=PROJECTED)),
    Case("claim-by-default", volume(persistentVolumeClaim={"claimName": "any", "readOnly": True})),
    Case("mount", container(volumeMounts=[{"name": "a", "mountPath": "/a", "subPath": "b", "readOnly": True}])),
    Case("sidecar", sidecar(ports=[{"containerPort": 80, "name": "http"}])),
    Case("init-container", sidecar("initContainers", restartPolicy="Always")),
    Case("tighter", container(securityContext={"readOnlyRootFilesystem": False, "privileged": False, "runAsUser": 7})),
    Case("tighter-pod", pod(securityContext={"runAsNonRoot": True, "fsGroup": 5, "supplementalGroups": [5]})),
    Case("probe", container(livenessProbe={"httpGet": {"path": "/", "port": 80}, "periodSeconds": 9})),
    Case("no-host-said", pod(hostNetwork=False, hostPID=False, automountServiceAccountToken=False)),
    Case("no-claim-template", {"storage": {"claimName": "any-of-the-namespace"}}),
    Case("listed-account", pod("orchestrator", serviceAccountName="team-x"), policy=LISTS),
    Case(
        "listed-claims",
        {**volume(persistentVolumeClaim={"claimName": "data"}), "storage": {"claimName": "shared-1"}},
        policy=LISTS,
    ),
    Case("listed-registry", {"inference": {"imagePullSecrets": [{"name": "registry"}]}}, policy=LISTS),
    Case("listed-image", {"trainer": {"image": "registry.example.com/team/x:1"}}, policy=LISTS),
    Case("listed-exact-image", {"trainer": {"image": "docker.io/library/busybox:1"}}, policy=LISTS),
    Case("listed-priority", {"trainer": {"priorityClassName": "batch-low"}}, policy=LISTS),
    Case(
        "any-template",
        pod(hostNetwork=True, containers=[{"name": "x", "securityContext": {"privileged": True}}]),
        policy=ANY,
    ),
    Case(
        "any-at-all",
        {**pod(serviceAccountName="x"), "orchestrator": {"envFrom": [{"secretRef": {"name": "db"}}]}},
        policy=EVERYTHING,
    ),
    Case("process-by-default", {"environments": [{"id": "a", "isolation": "Process"}]}),
    Case(
        "container-or-silent",
        {"environments": [{"id": "a"}, {"id": "b", "isolation": "Container"}, {"id": "c", "image": "x"}]},
        policy=CONTAINER,
    ),
]
REWARD = {"reward": "my_rewards:score", "path": "/data/rows.jsonl"}
REFUSED = [
    Case(
        "process-where-containers-are-required",
        {"environments": [{"id": "a"}, {"id": "b", "isolation": "Process"}]},
        ("environments[1].isolation",),
        CONTAINER,
    ),
    Case(
        "reward-in-a-process-where-containers-are-required",
        {"environments": [{"id": "dataset", "args": REWARD, "isolation": "Process"}]},
        ("environments[0].isolation",),
        CONTAINER,
    ),
    Case("secret-of-a-like-name", volume(secret={"secretName": "not-for-rlrun-x"}), (f"{V}.secret.secretName",)),
    Case("host-network", pod(hostNetwork=True), (f"{S}.hostNetwork",)),
    Case("host-pid", pod(hostPID=True), (f"{S}.hostPID",)),
    Case("host-ipc", pod(hostIPC=True), (f"{S}.hostIPC",)),
    Case("host-users", pod(hostUsers=True), (f"{S}.hostUsers",)),
    Case("one-process-tree", pod(shareProcessNamespace=True), (f"{S}.shareProcessNamespace",)),
    Case("node", pod(nodeName="node-1"), (f"{S}.nodeName",)),
    Case("hosts-file", pod(hostAliases=[{"ip": "1.2.3.4", "hostnames": ["x"]}]), (f"{S}.hostAliases",)),
    Case("name-servers", pod(dnsConfig={"nameservers": ["1.2.3.4"]}), (f"{S}.dnsConfig",)),
    Case("account", pod(serviceAccountName="admin"), (f"{S}.serviceAccountName",)),
    Case("account-by-its-old-name", pod(serviceAccount="admin"), (f"{S}.serviceAccount",)),
    Case("token", pod(automountServiceAccountToken=True), (f"{S}.automountServiceAccountToken",)),
    Case("unknown-field", pod(nodeSelectr={"a": "b"}), (f"{S}.nodeSelectr",)),
    Case("unknown-beside-spec", {"trainer": {"podTemplate": {"hostNetwork": True}}}, (f"{T}.hostNetwork",)),
    Case("no-map", {"trainer": {"podTemplate": {"spec": "abc"}}}, (S,)),
    Case("no-list", pod(containers="trainer"), (f"{S}.containers",)),
    Case("null-removes", pod(securityContext=None), (f"{S}.securityContext",)),
    Case("null-removes-limits", container(securityContext=None), (f"{C}.securityContext",)),
    Case("directive", pod(**{"$patch": "replace"}), (f"{S}.$patch",)),
    Case("directive-of-element", pod(containers=[{"name": "trainer", "$patch": "delete"}]), (f"{C}.$patch",)),
    Case("directive-of-security", container(securityContext={"$patch": "replace"}), (f"{CS}.$patch",)),
    Case("privileged", container(securityContext={"privileged": True}), (f"{CS}.privileged",)),
    Case("not-boolean", container(securityContext={"privileged": 0}), (f"{CS}.privileged",)),
    Case(
        "escalation",
        container(securityContext={"allowPrivilegeEscalation": True}),
        (f"{CS}.allowPrivilegeEscalation",),
    ),
    Case(
        "capability",
        container(securityContext={"capabilities": {"add": ["SYS_ADMIN"]}}),
        (f"{CS}.capabilities.add",),
    ),
    Case(
        "fewer-dropped",
        container(securityContext={"capabilities": {"drop": ["NET_RAW"]}}),
        (f"{CS}.capabilities.drop",),
    ),
    Case("proc-mount", container(securityContext={"procMount": "Unmasked"}), (f"{CS}.procMount",)),
    Case(
        "seccomp",
        pod(securityContext={"seccompProfile": {"type": "Unconfined"}}),
        (f"{PS}.seccompProfile.type",),
    ),
    Case(
        "seccomp-of-container",
        container(securityContext={"seccompProfile": {"type": "Localhost"}}),
        (f"{CS}.seccompProfile.type",),
    ),
    Case("root", pod(securityContext={"runAsUser": 0}), (f"{PS}.runAsUser",)),
    Case(
        "root-group",
        pod(securityContext={"supplementalGroups": [5, 0]}),
        (f"{PS}.supplementalGroups[1]",),
    ),
    Case("may-be-root", container(securityContext={"runAsNonRoot": False}), (f"{CS}.runAsNonRoot",)),
    Case("sysctl", pod(securityContext={"sysctls": [{"name": "a", "value": "1"}]}), (f"{PS}.sysctls",)),
    Case("host-port", container(ports=[{"containerPort": 1, "hostPort": 1}]), (f"{C}.ports[0].hostPort",)),
    Case("host-port-of-sidecar", sidecar(ports=[{"containerPort": 1, "hostIP": "0.0.0.0"}]), (f"{C}.ports[0].hostIP",)),
    Case("device", container(volumeDevices=[{"name": "a", "devicePath": "/dev/a"}]), (f"{C}.volumeDevices",)),
    Case(
        "expression-of-path",
        container(volumeMounts=[{"name": "a", "subPathExpr": "$(A)"}]),
        (f"{C}.volumeMounts[0].subPathExpr",),
    ),
    Case(
        "propagation",
        container(volumeMounts=[{"name": "a", "mountPropagation": "Bidirectional"}]),
        (f"{C}.volumeMounts[0].mountPropagation",),
    ),
    Case("reserved-variable", container(env=[{"name": "RLRUN_API_KEY", "value": "x"}]), (f"{C}.env[0].name",)),
    Case("torchrun-variable", container(env=[{"name": "MASTER_ADDR", "value": "x"}]), (f"{C}.env[0].name",)),
    Case(
        "secret-of-variable",
        container(env=[{"name": "A", "valueFrom": SECRET}]),
        (f"{C}.env[0].valueFrom.secretKeyRef.name",),
    ),
    Case(
        "secret-of-typed-variable",
        {"trainer": {"env": [{"name": "A", "valueFrom": SECRET}]}},
        ("trainer.env[0].valueFrom.secretKeyRef.name",),
    ),
    Case(
        "secret-of-all-variables",
        {"inference": {"envFrom": [{"secretRef": {"name": "db"}}]}},
        ("inference.envFrom[0].secretRef.name",),
    ),
    Case("secret-of-sidecar", sidecar(envFrom=[{"secretRef": {"name": "db"}}]), (f"{C}.envFrom[0].secretRef.name",)),
    Case("key-of-another-run", volume(secret={"secretName": "for-rlrun-x-key-0123abcd"}), (f"{V}.secret.secretName",)),
    Case(
        "later-key-where-all-are-allowed",
        volume(secret={"secretName": "other-key-0123abcd-12"}),
        (f"{V}.secret.secretName",),
        EVERYTHING,
    ),
    Case(
        "key-where-all-are-allowed",
        volume(secret={"secretName": "other-key-0123abcd"}),
        (f"{V}.secret.secretName",),
        EVERYTHING,
    ),
    Case("secret-of-tracker-by-convention", {"tracking": {"wandb": {"secretRef": {"name": "for-rlrun-wandb"}}}}),
    Case(
        "secret-of-tracker",
        {"tracking": {"wandb": {"secretRef": {"name": "db"}}, "mlflow": {"secretRef": {"name": "x-key-0123abcd"}}}},
        ("tracking.wandb.secretRef.name", "tracking.mlflow.secretRef.name"),
    ),
    Case("secret-volume", volume(secret={"secretName": "db"}), (f"{V}.secret.secretName",)),
    Case(
        "projected-secret",
        volume(projected={"sources": [{"secret": {"name": "db"}}]}),
        (f"{V}.projected.sources[0].secret.name",),
    ),
    Case("projected-token", volume(projected=TOKEN), (f"{V}.projected.sources[0].serviceAccountToken",)),
    Case("host-path", volume(hostPath={"path": "/"}), (f"{V}.hostPath",)),
    Case("csi", volume(csi={"driver": "x"}), (f"{V}.csi",)),
    Case("nfs", volume(nfs={"server": "x", "path": "/"}), (f"{V}.nfs",)),
    Case("ephemeral", volume(ephemeral={"volumeClaimTemplate": {}}), (f"{V}.ephemeral",)),
    Case("own-volume-replaced", pod(volumes=[{"name": "data", "hostPath": {"path": "/"}}]), (f"{V}.hostPath",)),
    Case("pull-secret", {"trainer": {"imagePullSecrets": [{"name": "db"}]}}, ("trainer.imagePullSecrets[0].name",)),
    Case("pull-secret-of-template", pod(imagePullSecrets=[{"name": "db"}]), (f"{S}.imagePullSecrets[0].name",)),
    Case("priority", {"trainer": {"priorityClassName": "system-node-critical"}}, ("trainer.priorityClassName",)),
    Case("priority-of-template", pod(priorityClassName="high"), (f"{S}.priorityClassName",)),
    Case("priority-number", pod(priority=10), (f"{S}.priority",)),
    Case(
        "label-of-operator",
        meta(labels={"rlrun.io/run": "x"}),
        (f"{M}.labels[rlrun.io/run]",),
    ),
    Case(
        "label-of-kubernetes",
        meta(labels={"app.kubernetes.io/name": "x"}),
        (f"{M}.labels[app.kubernetes.io/name]",),
    ),
    Case(
        "annotation-of-runtime",
        meta(annotations={"cdi.k8s.io/x": "gpu"}),
        (f"{M}.annotations[cdi.k8s.io/x]",),
    ),
    Case(
        "annotation-of-network",
        meta(annotations={"k8s.v1.cni.cncf.io/networks": "x"}),
        (f"{M}.annotations",),
    ),
    Case("owner", meta(ownerReferences=[]), (f"{M}.ownerReferences",)),
    Case("silent-sidecar", pod(containers=[{"name": "side", "image": "x"}]), (C,)),
    Case("silent-init-container", pod(initContainers=[{"name": "side", "image": "x"}]), (f"{S}.initContainers[0]",)),
    Case(
        "init-container-of-the-roles-name",
        pod(initContainers=[{"name": "trainer", "image": "x"}]),
        (f"{S}.initContainers[0]",),
    ),
    Case("container-of-another-role", pod(containers=[{"name": "inference", "image": "x"}]), (C,)),
    Case("half-silent-sidecar", sidecar(securityContext={"allowPrivilegeEscalation": False}), (C,)),
    Case("ephemeral-container", pod(ephemeralContainers=[{"name": "x"}]), (f"{S}.ephemeralContainers",)),
    Case(
        "probe-of-a-host",
        container(livenessProbe={"httpGet": {"host": "169.254.169.254", "port": 80}}),
        (f"{C}.livenessProbe.httpGet.host",),
    ),
    Case(
        "hook-of-a-host",
        container(lifecycle={"preStop": {"tcpSocket": {"host": "x", "port": 80}}}),
        (f"{C}.lifecycle.preStop.tcpSocket.host",),
    ),
    Case("devices-by-claim", pod(resourceClaims=[{"name": "x", "resourceClaimName": "y"}]), (f"{S}.resourceClaims",)),
    Case("other-image", {"trainer": {"image": "docker.io/x"}}, ("trainer.image",), LISTS),
    Case("image-of-a-like-name", {"trainer": {"image": "registry.example.com/team-evil/x"}}, ("trainer.image",), LISTS),
    Case("longer-exact-image", {"trainer": {"image": "docker.io/library/busybox:11"}}, ("trainer.image",), LISTS),
    Case(
        "image-of-environment",
        {"environments": [{"id": "a"}, {"id": "b", "image": "x"}]},
        ("environments[1].image",),
        LISTS,
    ),
    Case("image-of-sidecar", sidecar(), (f"{C}.image",), LISTS),
    Case("other-claim", {"storage": {"claimName": "other"}}, ("storage.claimName",), LISTS),
    Case(
        "other-claim-of-volume",
        volume(persistentVolumeClaim={"claimName": "other"}),
        (f"{V}.persistentVolumeClaim.claimName",),
        LISTS,
    ),
    Case("image-where-templates-are-free", pod(containers=[{"name": "x", "image": "evil"}]), (f"{C}.image",), ANY),
    Case("secret-where-templates-are-free", volume(secret={"secretName": "db"}), (f"{V}.secret.secretName",), ANY),
    Case(
        "all-at-once",
        {
            **pod(hostNetwork=True, nodeName="x"),
            **pod("orchestrator", serviceAccountName="x"),
            "inference": {"priorityClassName": "x"},
        },
        (
            f"{S}.hostNetwork",
            f"{S}.nodeName",
            "orchestrator.podTemplate.spec.serviceAccountName",
            "inference.priorityClassName",
        ),
    ),
]
CASES = [*ALLOWED, *REFUSED]
