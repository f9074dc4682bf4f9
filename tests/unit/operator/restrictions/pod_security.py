"""Pod Security `restricted` checks for pods that are not sent to an API server, written from the Kubernetes page."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

VOLUMES = {
    "configMap",
    "csi",
    "downwardAPI",
    "emptyDir",
    "ephemeral",
    "persistentVolumeClaim",
    "projected",
    "secret",
}


def violations(spec: dict[str, Any]) -> list[str]:
    """Return the controls that a pod violates. `spec` is the pod spec as `kubectl` sends it."""
    found = [key for key in ("hostNetwork", "hostPID", "hostIPC") if spec.get(key)]
    for volume in spec.get("volumes", ()):
        found += [f"volume {kind}" for kind in set(volume) - {"name"} if kind not in VOLUMES]
    of_pod = spec.get("securityContext") or {}
    found += ["sysctls"] if of_pod.get("sysctls") else []
    for kind in ("containers", "initContainers", "ephemeralContainers"):
        for container in spec.get(kind, ()):
            found += [f"{container.get('name')}: {what}" for what in _of_container(container, of_pod)]
    return found


def _of_container(container: dict[str, Any], of_pod: dict[str, Any]) -> Iterator[str]:
    own = container.get("securityContext") or {}
    both = of_pod | own
    capabilities = own.get("capabilities") or {}
    if own.get("privileged"):
        yield "privileged"
    if own.get("allowPrivilegeEscalation") is not False:
        yield "allowPrivilegeEscalation"
    if "ALL" not in capabilities.get("drop", ()):
        yield "capabilities are not dropped"
    if set(capabilities.get("add", ())) - {"NET_BIND_SERVICE"}:
        yield "capabilities are added"
    if both.get("runAsNonRoot") is not True:
        yield "runAsNonRoot"
    if both.get("runAsUser") == 0:
        yield "runs as root"
    if (both.get("seccompProfile") or {}).get("type") not in ("RuntimeDefault", "Localhost"):
        yield "seccomp"
    if own.get("procMount") not in (None, "Default"):
        yield "procMount"
    if any(port.get("hostPort") for port in container.get("ports", ())):
        yield "hostPort"
    for probe in ("livenessProbe", "readinessProbe", "startupProbe"):
        for handler in ("httpGet", "tcpSocket"):
            if ((container.get(probe) or {}).get(handler) or {}).get("host"):
                yield f"{probe} of a host"
