"""Fields of a run that affect pods: the types of rules, and the table with the allowed values of each field.

`refusals` applies the table in Python, `admission_policy` as CEL. It lists allowed fields, not forbidden ones: a field of a later
Kubernetes release is refused until it is added. The standard is Pod Security `restricted`
(https://kubernetes.io/docs/concepts/security/pod-security-standards/). In addition, a run gets only the identities, Secrets, claims and
node addresses that it was granted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from rlrun_operator.restrictions.run_policy import ListName


@dataclass(frozen=True)
class Anything:
    """Any value."""


@dataclass(frozen=True)
class Fields:
    """A map of these fields. `closed`: other fields are forbidden, and so is null, which would remove the operator's value."""

    fields: Mapping[str, Rule]
    closed: bool = True


@dataclass(frozen=True)
class Each:
    """A list whose elements all follow a rule."""

    element: Rule


@dataclass(frozen=True)
class Containers:
    """A list of containers. Each one, except the role's own, must state that it drops privileges.

    Attributes:
        own: whether the role's own container is in this list.
    """

    element: Rule
    own: bool


@dataclass(frozen=True)
class Only:
    """Exactly this value."""

    value: bool | str


@dataclass(frozen=True)
class Holds:
    """A list of names that contains this one."""

    value: str


@dataclass(frozen=True)
class NotRoot:
    """Number of a user or a group other than root."""


@dataclass(frozen=True)
class Listed:
    """A name from one of the policy's lists."""

    list: ListName


@dataclass(frozen=True)
class Keys:
    """A map of strings with allowed keys: `annotations` from the policy's list, `labels` except those of Kubernetes and the operator."""

    kind: Literal["annotations", "labels"]


@dataclass(frozen=True)
class VariableName:
    """Name of an environment variable that the operator does not set itself."""


@dataclass(frozen=True)
class Isolation:
    """Isolation of an environment's code: `Process` only if the policy's `environmentIsolation` is Any."""


Rule = Anything | Fields | Each | Containers | Only | Holds | NotRoot | Listed | Keys | VariableName | Isolation


def _allow_fields(*names: str) -> dict[str, Rule]:
    return {name: Anything() for name in names}


_KEY_OF_SECRET = Fields({"name": Listed("secrets"), **_allow_fields("key", "optional")})
_SOURCES_OF_VARIABLES = Fields(
    {"secretKeyRef": _KEY_OF_SECRET, **_allow_fields("configMapKeyRef", "fieldRef", "resourceFieldRef")}
)
_ENV = Each(Fields({"name": VariableName(), "value": Anything(), "valueFrom": _SOURCES_OF_VARIABLES}))
_ENV_FROM = Each(
    Fields(
        {
            **_allow_fields("prefix", "configMapRef"),
            "secretRef": Fields({"name": Listed("secrets"), **_allow_fields("optional")}),
        }
    )
)
_PULL_SECRETS = Each(Fields({"name": Listed("secrets")}))

_HTTP = Fields(_allow_fields("path", "port", "scheme", "httpHeaders"))
"""HTTP probe without `host`: with it, the kubelet would connect to any address from the node's network."""
_TCP = Fields(_allow_fields("port"))
_PROBE = Fields(
    {
        **_allow_fields("exec", "grpc", "initialDelaySeconds", "periodSeconds", "timeoutSeconds", "successThreshold"),
        **_allow_fields("failureThreshold", "terminationGracePeriodSeconds"),
        "httpGet": _HTTP,
        "tcpSocket": _TCP,
    }
)
_HOOK = Fields({**_allow_fields("exec", "sleep"), "httpGet": _HTTP, "tcpSocket": _TCP})

_SECCOMP = Fields({"type": Only("RuntimeDefault")})
_USERS: Mapping[str, Rule] = {
    "runAsNonRoot": Only(True),
    "runAsUser": NotRoot(),
    "runAsGroup": NotRoot(),
    "seccompProfile": _SECCOMP,
}
_CONTAINER_SECURITY = Fields(
    {
        **_USERS,
        "allowPrivilegeEscalation": Only(False),
        "privileged": Only(False),
        "readOnlyRootFilesystem": Anything(),
        "capabilities": Fields({"drop": Holds("ALL")}),
    }
)
_POD_SECURITY = Fields(
    {
        **_USERS,
        "fsGroup": NotRoot(),
        "supplementalGroups": Each(NotRoot()),
        "fsGroupChangePolicy": Anything(),
    }
)

_CONTAINER = Fields(
    {
        **_allow_fields("name", "imagePullPolicy", "command", "args", "workingDir", "resources", "restartPolicy"),
        **_allow_fields("terminationMessagePath", "terminationMessagePolicy"),
        "image": Listed("images"),
        "env": _ENV,
        "envFrom": _ENV_FROM,
        "ports": Each(Fields(_allow_fields("name", "containerPort", "protocol"))),
        "volumeMounts": Each(Fields(_allow_fields("name", "mountPath", "subPath", "readOnly"))),
        "livenessProbe": _PROBE,
        "readinessProbe": _PROBE,
        "startupProbe": _PROBE,
        "lifecycle": Fields({"postStart": _HOOK, "preStop": _HOOK}),
        "securityContext": _CONTAINER_SECURITY,
    }
)

_PROJECTED = Fields(
    {
        "sources": Each(
            Fields(
                {
                    **_allow_fields("configMap", "downwardAPI"),
                    "secret": Fields({"name": Listed("secrets"), **_allow_fields("items", "optional")}),
                }
            )
        ),
        **_allow_fields("defaultMode"),
    }
)
"""Projected sources without `serviceAccountToken`, which would be a token of the pod's account."""
_VOLUME = Fields(
    {
        **_allow_fields("name", "emptyDir", "configMap", "downwardAPI"),
        "secret": Fields({"secretName": Listed("secrets"), **_allow_fields("items", "optional", "defaultMode")}),
        "persistentVolumeClaim": Fields({"claimName": Listed("claims"), **_allow_fields("readOnly")}),
        "projected": _PROJECTED,
    }
)
"""Volume without `ephemeral`, whose data source may be a forbidden claim, and without `hostPath`, `csi` and all other drivers."""

POD_TEMPLATE = Fields(
    {
        "metadata": Fields({"labels": Keys("labels"), "annotations": Keys("annotations")}),
        "spec": Fields(
            {
                **_allow_fields(
                    "nodeSelector", "affinity", "tolerations", "topologySpreadConstraints", "schedulerName"
                ),
                **_allow_fields("runtimeClassName", "terminationGracePeriodSeconds", "activeDeadlineSeconds"),
                "priorityClassName": Listed("priorityClasses"),
                "serviceAccountName": Listed("serviceAccounts"),
                "automountServiceAccountToken": Only(False),
                "imagePullSecrets": _PULL_SECRETS,
                "securityContext": _POD_SECURITY,
                "hostNetwork": Only(False),
                "hostPID": Only(False),
                "hostIPC": Only(False),
                "hostUsers": Only(False),
                "shareProcessNamespace": Only(False),
                "volumes": Each(_VOLUME),
                "containers": Containers(_CONTAINER, own=True),
                "initContainers": Containers(_CONTAINER, own=False),
            }
        ),
    }
)
"""Rule for a role's `podTemplate`."""

ROLE = Fields(
    {
        "image": Listed("images"),
        "imagePullSecrets": _PULL_SECRETS,
        "priorityClassName": Listed("priorityClasses"),
        "env": _ENV,
        "envFrom": _ENV_FROM,
        "podTemplate": POD_TEMPLATE,
    },
    closed=False,
)
"""Rule for a role's block; its other fields do not affect the rights of pods."""

_TRACKER = Fields({"secretRef": Fields({"name": Listed("secrets"), **_allow_fields("optional")})}, closed=False)
REST = Fields(
    {
        "tracking": Fields({"wandb": _TRACKER, "mlflow": _TRACKER}, closed=False),
        "storage": Fields({"claimName": Listed("claims")}, closed=False),
        "environments": Each(Fields({"image": Listed("images"), "isolation": Isolation()}, closed=False)),
    },
    closed=False,
)
"""Rule for the specification outside of the roles' blocks."""
