"""Sidecars of the orchestrator's pod for environments with their own image.

Such a container may run code that the rest of the run does not trust. It shares with the orchestrator the pod's network and one folder
with its socket, which is read-only in the orchestrator. Environments share nothing writable with each other.
"""

from __future__ import annotations

import math

from rlrun.config.models.rollout import EnvironmentConfig
from rlrun.runtime.bootstrap import HOST_MODULE, START, folder_of, socket_of
from rlrun_operator.render import security, volume
from rlrun_operator.render.context import RunContext
from rlrun_operator.state import Json

ENVIRONMENTS_FOLDER = "/run/rlrun-environments"
CODE = "environment-code"
"""Name of the volume with this package's sources, and of the init container that fills it. The orchestrator does not read it."""
CODE_FOLDER = f"{ENVIRONMENTS_FOLDER}/code"
HOST_MIB = 1024
"""Memory of an environment's container in addition to its workers, in MiB."""
SIZE_LIMIT = "10Gi"
"""Size limit of each scratch volume of an environment: the kubelet evicts a pod that exceeds it, before the node's disk is full."""


def own_images(ctx: RunContext) -> list[tuple[int, EnvironmentConfig]]:
    """Return the environments with their own image, and their indices in the manifest."""
    return [(index, e) for index, e in enumerate(ctx.spec.environments) if e.image is not None]


def environment_volumes(ctx: RunContext) -> list[Json]:
    """Return the volumes of the orchestrator's pod for environments: the code, and a folder and /tmp for each environment."""
    found = own_images(ctx)
    if not found:
        return []
    names = [name for index, _ in found for name in (_container_name(index), _scratch_volume(index))]
    return [
        {"name": CODE, "emptyDir": {"sizeLimit": "1Gi"}},
        *({"name": name, "emptyDir": {"sizeLimit": SIZE_LIMIT}} for name in names),
    ]


def socket_mounts(ctx: RunContext) -> list[dict[str, object]]:
    """Return the mounts of the orchestrator's container: the folders of the sockets, read-only because a connection does not write."""
    return [
        {"name": _container_name(index), "mountPath": folder_of(ENVIRONMENTS_FOLDER, index), "readOnly": True}
        for index, _ in own_images(ctx)
    ]


def environment_containers(ctx: RunContext) -> list[dict[str, object]]:
    """Return the init containers of the orchestrator's pod: one that copies the code of this package, and a native sidecar for each
    environment with an image. A sidecar has neither the run's key nor a token, and only the `volumePaths` of the run's volume.
    """
    found = own_images(ctx)
    return (
        [_code_mounts(ctx), *(_environment_sidecar(ctx, index, environment) for index, environment in found)]
        if found
        else []
    )


def _container_name(index: int) -> str:
    return f"environment-{index}"


def _scratch_volume(index: int) -> str:
    return f"environment-{index}-tmp"


def _code_mounts(ctx: RunContext) -> Json:
    own = ctx.spec.orchestrator
    container = {
        "name": CODE,
        "image": own.image or ctx.settings.images["orchestrator"],
        "command": ["rlrun-pod", "share-code", CODE_FOLDER],
        "volumeMounts": [{"name": CODE, "mountPath": CODE_FOLDER}],
        "securityContext": security.CONTAINER,
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }
    policy = own.image_pull_policy or (None if own.image else ctx.settings.image_pull_policy)
    return container | ({"imagePullPolicy": policy} if policy is not None else {})


def _environment_sidecar(ctx: RunContext, index: int, environment: EnvironmentConfig) -> dict[str, object]:
    folder = folder_of(ENVIRONMENTS_FOLDER, index)
    return {
        "name": _container_name(index),
        "image": environment.image,
        "restartPolicy": "Always",
        "command": [
            environment.python or "python3",
            "-c",
            START,
            f"{CODE_FOLDER}/rlrun",
            HOST_MODULE,
            socket_of(ENVIRONMENTS_FOLDER, index),
        ],
        "env": [
            {"name": "HOME", "value": f"{folder}/home"},
            {"name": "TMPDIR", "value": "/tmp"},
            {"name": "PYTHONUNBUFFERED", "value": "1"},
            {"name": "OMP_NUM_THREADS", "value": "1"},
        ],
        "volumeMounts": [
            *_readable_mounts(ctx, environment),
            {"name": CODE, "mountPath": CODE_FOLDER, "readOnly": True},
            {"name": _container_name(index), "mountPath": folder},
            {"name": _scratch_volume(index), "mountPath": "/tmp"},
        ],
        "resources": {"requests": {"memory": "128Mi"}, "limits": {"memory": f"{_memory_mib(environment)}Mi"}},
        "securityContext": security.environment_context(index, assigned=ctx.settings.assigned_users),
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }


def _memory_mib(environment: EnvironmentConfig) -> int:
    """Return the memory limit: that of all workers, and `HOST_MIB`. The kernel ends this container before the node's memory is full."""
    return math.ceil(environment.memory_gib * environment.workers * 1024) + HOST_MIB


def _readable_mounts(ctx: RunContext, environment: EnvironmentConfig) -> list[dict[str, object]]:
    """Return the mounts of the readable parts of the run's volume, at the same paths as in the orchestrator."""
    return [volume.mount_part(ctx, path) | {"readOnly": True} for path in dict.fromkeys(environment.volume_paths)]
