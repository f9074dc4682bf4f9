"""Containers of environments that have an image of their own, beside the orchestrator's in its pod.

Such a container may hold code that the run's other parts do not trust. It shares with the orchestrator one folder, which holds its socket
and is read-only there, and the pod's network; with other environments nothing that can be written.
"""

from __future__ import annotations

import math

from rlrun.config.models.rollout import EnvironmentConfig
from rlrun.runtime.bootstrap import HOST_MODULE, START, folder_of, socket_of
from rlrun_operator.render import security, volume
from rlrun_operator.render.context import RunContext
from rlrun_operator.state import Json

FOLDER = "/run/rlrun-environments"
CODE = "environment-code"
"""Volume with this package's sources, and the init container that fills it. The orchestrator itself never reads it."""
CODE_FOLDER = f"{FOLDER}/code"
HOST_MIB = 1024
"""Memory of an environment's container beyond its workers'."""
SIZE_LIMIT = "10Gi"
"""Size limit of each scratch volume of an environment: the kubelet evicts a pod that holds more, before the node's disk is full."""


def own_images(ctx: RunContext) -> list[tuple[int, EnvironmentConfig]]:
    """Environments that have an image of their own, and their places in the manifest."""
    return [(index, e) for index, e in enumerate(ctx.spec.environments) if e.image is not None]


def environment_volumes(ctx: RunContext) -> list[Json]:
    """Volumes of the orchestrator's pod for them: the code, and for each environment its folder and its /tmp."""
    found = own_images(ctx)
    if not found:
        return []
    names = [name for index, _ in found for name in (_container_name(index), _scratch_volume(index))]
    return [
        {"name": CODE, "emptyDir": {"sizeLimit": "1Gi"}},
        *({"name": name, "emptyDir": {"sizeLimit": SIZE_LIMIT}} for name in names),
    ]


def socket_mounts(ctx: RunContext) -> list[dict[str, object]]:
    """Mounts of the orchestrator's container: the folders of the sockets. Connecting writes nothing."""
    return [
        {"name": _container_name(index), "mountPath": folder_of(FOLDER, index), "readOnly": True}
        for index, _ in own_images(ctx)
    ]


def environment_containers(ctx: RunContext) -> list[dict[str, object]]:
    """Init containers of the orchestrator's pod: one that shares the code of this package, and a native sidecar for each environment
    that has an image. A sidecar has neither the run's key nor a token, and of the run's volume only what `volumePaths` names.
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
    folder = folder_of(FOLDER, index)
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
            socket_of(FOLDER, index),
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
        "securityContext": security.of_environment(index, assigned=ctx.settings.assigned_users),
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }


def _memory_mib(environment: EnvironmentConfig) -> int:
    """All that its workers may have, and room for the host: the kernel ends this container before the node is full."""
    return math.ceil(environment.memory_gib * environment.workers * 1024) + HOST_MIB


def _readable_mounts(ctx: RunContext, environment: EnvironmentConfig) -> list[dict[str, object]]:
    """Mounts of what it may read of the run's volume, at the paths that the orchestrator sees."""
    return [volume.mount_part(ctx, path) | {"readOnly": True} for path in dict.fromkeys(environment.volume_paths)]
