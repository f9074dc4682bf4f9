"""Security contexts of all pods and containers: Kubernetes' restricted standard."""

from __future__ import annotations

from rlrun_operator.state import Json

USER = 1000
"""User and group of a run's pods; owner of what they write on the volume."""
ENVIRONMENT_USERS = 1001
"""User of the container of `environments[0]`; the next one has the next. Their group is that of
the pod, which may read what a run writes."""

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


def of_pod(*, assigned: bool) -> Json:
    """Security context of a pod; `assigned`: users and groups are the namespace's to choose, as OpenShift's are."""
    return {name: value for name, value in POD.items() if not (assigned and name in _NUMBERS)}


def of_environment(index: int, *, assigned: bool) -> Json:
    """Security context of an environment's container."""
    return CONTAINER if assigned else CONTAINER | {"runAsUser": ENVIRONMENT_USERS + index}
