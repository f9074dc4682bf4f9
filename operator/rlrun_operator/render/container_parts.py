"""Parts of containers: probes, security contexts, and mounts of the run's volume.

The roles answer the probes (`rlrun.protocol.messages.endpoints`). The security contexts follow Kubernetes' restricted standard. The whole
volume is readable, and the run's own folders are writable.
"""

from __future__ import annotations

from pathlib import Path

from rlrun.protocol.files.paths import RunPaths
from rlrun.protocol.files.shared_trainer_files import join_file
from rlrun.protocol.messages import endpoints
from rlrun_operator.names import Role
from rlrun_operator.render.render_context import RunContext
from rlrun_operator.state import Json

ENGINE_START_SECONDS = 7200
"""Longest start of an engine: it may have to fetch hundreds of gigabytes and compile."""
ORCHESTRATOR_START_SECONDS = 1800
"""Longest wait until the orchestrator serves its metrics, which it does before it waits for anything itself."""
_START_PERIOD_SECONDS = 2
_READY_PERIOD_SECONDS = 3


def container_probes(role: Role) -> dict[str, object]:
    """Return the probes of a role's container.

    The trainer has no liveness probe: its container is never restarted within an attempt, and the run's progress shows a group that hangs.
    The liveness probes of the other roles only fail after minutes without an answer.
    """
    if role == "trainer":
        return {"readinessProbe": _readiness_probe(endpoints.POD_READY, endpoints.POD_PORT)}
    if role == "inference":
        path, port, start, ready = (
            endpoints.ENGINE_HEALTH,
            endpoints.ENGINE_PORT,
            ENGINE_START_SECONDS,
            endpoints.ENGINE_READY,
        )
    else:
        path, port, start, ready = (
            endpoints.ORCHESTRATOR_HEALTH,
            endpoints.ORCHESTRATOR_PORT,
            ORCHESTRATOR_START_SECONDS,
            endpoints.ORCHESTRATOR_READY,
        )
    return {
        "startupProbe": _http_probe(path, port, period=_START_PERIOD_SECONDS, failures=start // _START_PERIOD_SECONDS),
        "livenessProbe": _http_probe(path, port, period=15, timeout=10, failures=12),
        "readinessProbe": _readiness_probe(ready, port),
    }


def _readiness_probe(path: str, port: int) -> Json:
    return _http_probe(path, port, period=_READY_PERIOD_SECONDS, timeout=3, failures=3)


def _http_probe(path: str, port: int, *, period: int, failures: int, timeout: int = 2) -> dict[str, object]:
    """Return a probe by HTTP GET, which succeeds with a status 2xx.

    Args:
        path: path that needs no key.
        port: port of the container.
        period: seconds between two requests.
        failures: number of failures in a row until the probe fails.
        timeout: seconds until a request fails.
    """
    return {
        "httpGet": {"path": path, "port": port},
        "periodSeconds": period,
        "timeoutSeconds": timeout,
        "failureThreshold": failures,
    }


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
    """Return the security context of an environment's container; `assigned` as in `pod_context`."""
    return CONTAINER if assigned else CONTAINER | {"runAsUser": ENVIRONMENT_USERS + index}


DATA = "data"
"""Name of the volume in every pod."""
HUB_FOLDER = ".huggingface"
"""Cache of models and data sets: in the run's folder, or on the volume for all runs. No run can have this name."""

HUB_DATA = ("hub", "datasets", "assets", "xet")
"""Folders of the hub's cache with data. Code (`modules`) and a token may be next to them."""


def hub_home(ctx: RunContext) -> str:
    """Return the path of the hub's cache in the pods."""
    return f"{ctx.storage.mount_path if ctx.storage.hub_cache == 'Volume' else ctx.folder}/{HUB_FOLDER}"


def hub_data(ctx: RunContext) -> list[str]:
    """Return the folders of the hub's cache with data, as paths below the mount.

    A cache for all runs is returned as a whole: another user may own it, so the run cannot create folders in it.
    """
    if ctx.storage.hub_cache == "Volume":
        return [HUB_FOLDER]
    return [f"{ctx.name}/{HUB_FOLDER}/{name}" for name in HUB_DATA]


def role_mounts(ctx: RunContext, role: Role) -> list[Json]:
    """Return the mounts of a role's container."""
    if _writes_all(ctx, role):
        return [run_mount(ctx)]
    return [run_mount(ctx) | {"readOnly": True}, *(mount_part(ctx, path) for path in _written_folders(ctx))]


def folders_to_make(ctx: RunContext) -> list[str]:
    """Return the folders that must exist before a container mounts them: the kubelet creates missing folders as root."""
    return [f"{ctx.storage.mount_path}/{path}" for path in _written_folders(ctx)]


def run_mount(ctx: RunContext) -> Json:
    """Return the writable mount of the run's part of the volume."""
    mount = {"name": DATA, "mountPath": ctx.storage.mount_path}
    return mount if ctx.storage.sub_path is None else mount | {"subPath": ctx.storage.sub_path}


def mount_part(ctx: RunContext, path: str) -> Json:
    """Return the writable mount of a file or folder of the volume, at the same path as in `run_mount`."""
    above = f"{ctx.storage.sub_path}/" if ctx.storage.sub_path is not None else ""
    return {"name": DATA, "mountPath": f"{ctx.storage.mount_path}/{path}", "subPath": f"{above}{path}"}


def _writes_all(ctx: RunContext, role: Role) -> bool:
    """Return whether a role writes anywhere: a trainer with guests writes their checkpoints, and their names are unknown before."""
    return role == "trainer" and ctx.spec.trainer.lora is not None and ctx.spec.trainer.lora.slots > 1


def _written_folders(ctx: RunContext) -> list[str]:
    """Return the folders that the run writes, relative to the mount."""
    paths = [ctx.name]
    if ctx.host is not None:
        paths.append(str(join_file(RunPaths(Path(ctx.host.name)), ctx.name).parent))  # a guest requests its slot there
    if ctx.storage.hub_cache == "Volume":
        paths.append(HUB_FOLDER)
    return paths
