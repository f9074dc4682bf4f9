"""Security contexts of all pods and containers: Kubernetes' restricted standard."""

from __future__ import annotations

from rlrun_operator.state import Json

USER = 1000
"""User and group of a run's pods, and owner of their files on the volume."""
ENVIRONMENT_USERS = 1001
"""User of the container of `environments[0]`; each next one has the next number. Their group is that of the pod, which may read the
run's files."""

CONTAINER: Json = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "runAsNonRoot": True,
    "capabilities": {"drop": ["ALL"]},
}
POD: Json = {
    "runAsNonRoot": True,
    "runAsUser": USER,
    "runAsGroup": USER,
    "fsGroup": USER,
    "fsGroupChangePolicy": "OnRootMismatch",
    "seccompProfile": {"type": "RuntimeDefault"},
}
_NUMBERS = ("runAsUser", "runAsGroup", "fsGroup", "fsGroupChangePolicy")


def pod_context(*, assigned: bool) -> Json:
    """Return the security context of a pod; `assigned`: the namespace assigns users and groups, as in OpenShift."""
    return {name: value for name, value in POD.items() if not (assigned and name in _NUMBERS)}


def environment_context(index: int, *, assigned: bool) -> Json:
    """Return the security context of an environment's container; `assigned` as in `of_pod`."""
    return CONTAINER if assigned else CONTAINER | {"runAsUser": ENVIRONMENT_USERS + index}
