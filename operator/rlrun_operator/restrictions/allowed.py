"""The fields of a run that make pods, and what each may be.

A list of what is allowed and not of what is forbidden: a field that a later Kubernetes has is refused until it is judged. The standard is
Pod Security `restricted` (https://kubernetes.io/docs/concepts/security/pod-security-standards/), and beyond it no identity, Secret, claim
or address of a node that the run was not given.
"""

from __future__ import annotations

from collections.abc import Mapping

from rlrun_operator.restrictions.rules import (
    Anything,
    Containers,
    Each,
    Fields,
    Holds,
    Isolation,
    Keys,
    Listed,
    NotRoot,
    Only,
    Rule,
    VariableName,
)


def _is_free(*names: str) -> dict[str, Rule]:
    return {name: Anything() for name in names}


_KEY_OF_SECRET = Fields({"name": Listed("secrets"), **_is_free("key", "optional")})
_SOURCES_OF_VARIABLES = Fields(
    {"secretKeyRef": _KEY_OF_SECRET, **_is_free("configMapKeyRef", "fieldRef", "resourceFieldRef")}
)
_ENV = Each(Fields({"name": VariableName(), "value": Anything(), "valueFrom": _SOURCES_OF_VARIABLES}))
_ENV_FROM = Each(
    Fields(
        {**_is_free("prefix", "configMapRef"), "secretRef": Fields({"name": Listed("secrets"), **_is_free("optional")})}
    )
)
_PULL_SECRETS = Each(Fields({"name": Listed("secrets")}))

_HTTP = Fields(_is_free("path", "port", "scheme", "httpHeaders"))
"""Probe over HTTP without `host`: the kubelet would ask any address from the node's network."""
_TCP = Fields(_is_free("port"))
_PROBE = Fields(
    {
        **_is_free("exec", "grpc", "initialDelaySeconds", "periodSeconds", "timeoutSeconds", "successThreshold"),
        **_is_free("failureThreshold", "terminationGracePeriodSeconds"),
        "httpGet": _HTTP,
        "tcpSocket": _TCP,
    }
)
_HOOK = Fields({**_is_free("exec", "sleep"), "httpGet": _HTTP, "tcpSocket": _TCP})

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
        **_is_free("name", "imagePullPolicy", "command", "args", "workingDir", "resources", "restartPolicy"),
        **_is_free("terminationMessagePath", "terminationMessagePolicy"),
        "image": Listed("images"),
        "env": _ENV,
        "envFrom": _ENV_FROM,
        "ports": Each(Fields(_is_free("name", "containerPort", "protocol"))),
        "volumeMounts": Each(Fields(_is_free("name", "mountPath", "subPath", "readOnly"))),
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
                    **_is_free("configMap", "downwardAPI"),
                    "secret": Fields({"name": Listed("secrets"), **_is_free("items", "optional")}),
                }
            )
        ),
        **_is_free("defaultMode"),
    }
)
"""Sources without `serviceAccountToken`: a token of the pod's account."""
_VOLUME = Fields(
    {
        **_is_free("name", "emptyDir", "configMap", "downwardAPI"),
        "secret": Fields({"secretName": Listed("secrets"), **_is_free("items", "optional", "defaultMode")}),
        "persistentVolumeClaim": Fields({"claimName": Listed("claims"), **_is_free("readOnly")}),
        "projected": _PROJECTED,
    }
)
"""Volume without `ephemeral`, whose data source may be a claim that is not allowed, and without `hostPath`, `csi` and all drivers."""

POD_TEMPLATE = Fields(
    {
        "metadata": Fields({"labels": Keys("labels"), "annotations": Keys("annotations")}),
        "spec": Fields(
            {
                **_is_free("nodeSelector", "affinity", "tolerations", "topologySpreadConstraints", "schedulerName"),
                **_is_free("runtimeClassName", "terminationGracePeriodSeconds", "activeDeadlineSeconds"),
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
"""Rule for a role's block; its other fields ask nothing of Kubernetes that a run does not have anyway."""

_TRACKER = Fields({"secretRef": Fields({"name": Listed("secrets"), **_is_free("optional")})}, closed=False)
REST = Fields(
    {
        "tracking": Fields({"wandb": _TRACKER, "mlflow": _TRACKER}, closed=False),
        "storage": Fields({"claimName": Listed("claims")}, closed=False),
        "environments": Each(Fields({"image": Listed("images"), "isolation": Isolation()}, closed=False)),
    },
    closed=False,
)
"""Rule for the specification, beside the roles' blocks."""
