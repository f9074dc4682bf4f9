"""Security contexts of all pods and containers: Kubernetes' restricted standard."""

from __future__ import annotations

from typing import Any

USER = 1000
"""User and group of a run's pods; owner of what they write on the volume."""
ENVIRONMENT_USERS = 1001
"""User of the container of `environments[0]`; the next one has the next. Their group is that of
the pod, which may read what a run writes."""

CONTAINER: dict[str, Any] = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "runAsNonRoot": True,
    "capabilities": {"drop": ["ALL"]},
}
POD: dict[str, Any] = {
    "runAsNonRoot": True,
    "runAsUser": USER,
    "runAsGroup": USER,
    "fsGroup": USER,
    "fsGroupChangePolicy": "OnRootMismatch",
    "seccompProfile": {"type": "RuntimeDefault"},
}
