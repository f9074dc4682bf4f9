"""Containers of environments: one for each environment with an image, a shared one, and one for a tiny model's warm-up.

An environment with its own image is a sidecar of the orchestrator's pod. It may run code that the rest of the run does not trust. It shares
with the orchestrator the pod's network and one folder with its socket, which is read-only in the orchestrator. Environments with images
share nothing writable with each other.

Environments without an image share one container of the orchestrator's pod by default. It separates code of users from the run's key, the
token of the Lease and the keys of trackers. All of them share it, because each container needs a Python process: 20 environments would need
20. Landlock separates the environments within it, like processes in the orchestrator's container. It has the same view of the run's volume
as the orchestrator's container, but only writes the hub's caches of data. The orchestrator sends each environment the variables that it may
have.

The code of a tiny model's warm-up environment (`model.tiny.warmupEnvironment`) runs in an init container, which writes a file with
conversations. The next container, which creates the model from this file, has the run's key and its configuration, and writes the run's
folder. The init container has none of these. It has the mounts of an environment: the run's volume for reading, and the hub's caches of
data for writing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence, Set
from pathlib import Path

from rlrun.api.kubernetes_types import EnvFromSource, EnvVar, read_amount
from rlrun.config.environment_variables import is_passed, names_in_arguments
from rlrun.config.models.rollout import EnvironmentConfig
from rlrun.protocol.files.paths import RunPaths
from rlrun.runtime.bootstrap import (
    DEMONSTRATIONS_FILE,
    DEMONSTRATIONS_VARIABLE,
    HOST_MODULE,
    START,
    folder_of,
    socket_of,
)
from rlrun_operator.names import DEMONSTRATIONS_CONTAINER, Role
from rlrun_operator.render import container_parts
from rlrun_operator.render.pod_placement import role_block
from rlrun_operator.render.render_context import RunContext
from rlrun_operator.state import Json, Manifest

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
        "securityContext": container_parts.CONTAINER,
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
        "securityContext": container_parts.environment_context(index, assigned=ctx.settings.assigned_users),
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }


def _memory_mib(environment: EnvironmentConfig) -> int:
    """Return the memory limit: that of all workers, and `HOST_MIB`. The kernel ends this container before the node's memory is full."""
    return math.ceil(environment.memory_gib * environment.workers * 1024) + HOST_MIB


def _readable_mounts(ctx: RunContext, environment: EnvironmentConfig) -> list[dict[str, object]]:
    """Return the mounts of the readable parts of the run's volume, at the same paths as in the orchestrator."""
    return [
        container_parts.mount_part(ctx, path) | {"readOnly": True} for path in dict.fromkeys(environment.volume_paths)
    ]


NAME = "environments"
"""Name of the container, and of the volume with its socket."""
SOCKET_FOLDER = f"{ENVIRONMENTS_FOLDER}/shared"
SOCKET = f"{SOCKET_FOLDER}/socket"
_SCRATCH = {"environments-tmp": "/tmp", "environments-home": "/home/rlrun"}
_SHARED_MEMORY = "environments-shm"
_SPLIT = ("cpu", "memory", "ephemeral-storage")
"""Resources of which the orchestrator and its environments each request half."""
_NOT_COPIED = ("secret", "projected", "csi")
"""Sources of volumes that contain secrets or tokens."""


def has_shared(ctx: RunContext) -> bool:
    """Return whether an environment of the run is in the shared container."""
    return any(environment.shares_container for environment in ctx.spec.environments)


def shared_volumes(ctx: RunContext, *, scratch_limit: str) -> list[Json]:
    """Return the volumes of the container: its socket and its scratch folders.

    Args:
        ctx: the run.
        scratch_limit: size limit of each scratch folder.
    """
    if not has_shared(ctx):
        return []
    memory = {"medium": "Memory"}
    if (limit := ctx.spec.orchestrator.shared_memory) is not None:
        memory["sizeLimit"] = limit
    return [
        {"name": NAME, "emptyDir": {"sizeLimit": "1Gi"}},
        *({"name": name, "emptyDir": {"sizeLimit": scratch_limit}} for name in _SCRATCH),
        {"name": _SHARED_MEMORY, "emptyDir": memory},
    ]


def shared_socket_mounts(ctx: RunContext) -> list[Json]:
    """Return the mount of the orchestrator's container: the folder of the socket, which it does not write."""
    return [{"name": NAME, "mountPath": SOCKET_FOLDER, "readOnly": True}] if has_shared(ctx) else []


def shared_folders(ctx: RunContext) -> list[str]:
    """Return the folders of the run's volume that the container writes, as the pods see them."""
    return [f"{ctx.storage.mount_path}/{path}" for path in container_parts.hub_data(ctx)] if has_shared(ctx) else []


def shared_mounts(ctx: RunContext) -> list[Json]:
    """Return the mounts of the container."""
    return [
        container_parts.run_mount(ctx) | {"readOnly": True},
        *(container_parts.mount_part(ctx, path) for path in container_parts.hub_data(ctx)),
        {"name": NAME, "mountPath": SOCKET_FOLDER},
        {"name": _SHARED_MEMORY, "mountPath": "/dev/shm"},
        *({"name": name, "mountPath": path} for name, path in _SCRATCH.items()),
        *mounts_of_the_user(ctx, "orchestrator", taken={*_SCRATCH.values(), "/dev/shm"}),
    ]


def mounts_of_the_user(ctx: RunContext, role: Role, *, taken: Set[str]) -> Iterator[Json]:
    """Yield the mounts that `podTemplate` adds to a role's container, for reading: modules and data of environments.

    Volumes with Secrets stay with the role: they may be a tracker's.

    Args:
        ctx: the run.
        role: role whose container has the mounts.
        taken: mount paths of the other container, which stay as they are.
    """
    spec = role_block(ctx.spec, role).pod_template.get("spec")
    spec = spec if isinstance(spec, Mapping) else {}
    copied = {
        volume.get("name")
        for volume in _list_mappings(spec.get("volumes"))
        if not any(volume.get(source) is not None for source in _NOT_COPIED)
    }
    for container in _list_mappings(spec.get("containers")):
        if container.get("name") == role:
            for mount in _list_mappings(container.get("volumeMounts")):
                if mount.get("name") in copied and mount.get("mountPath") not in {*taken, ctx.storage.mount_path}:
                    yield {**mount, "readOnly": True}


def _list_mappings(found: object) -> list[Manifest]:
    """Return the mappings of a list; the API server refuses values of another type."""
    if not isinstance(found, Sequence) or isinstance(found, str):
        return []
    return [element for element in found if isinstance(element, Mapping)]


def split_resources(resources: Manifest) -> tuple[Json, Json]:
    """Split the resources of the orchestrator's block between its container and that of its environments.

    Each requests half of CPU, memory and ephemeral storage, so that the pod requests as much as without the second container. Each may use
    the whole limit, because the need of an environment is unknown before. Devices are for environments.

    Args:
        resources: `requests` and `limits`, by name.
    """
    limits, requests = dict(resources.get("limits") or {}), dict(resources.get("requests") or {})
    own: Json = {"limits": {}, "requests": {}}
    theirs: Json = {"limits": {}, "requests": {}}
    for name in {**limits, **requests}:
        if name in _SPLIT:
            asked = _half_quantity(name, requests[name] if name in requests else limits[name])
            for part in (own, theirs):
                part["requests"][name] = asked
                part["limits"] |= {name: limits[name]} if name in limits else {}
            continue
        part = theirs if "/" in name else own
        for kind, amounts in (("limits", limits), ("requests", requests)):
            part[kind] |= {name: amounts[name]} if name in amounts else {}
    return _without_empty(own), _without_empty(theirs)


def _half_quantity(name: str, value: str | int) -> str:
    """Return half of a quantity, rounded up to a thousandth of a core or to a byte."""
    if name == "cpu":
        return f"{-(-int(read_amount(value) * 1000) // 2)}m"
    size = -(-int(read_amount(value)) // 2)
    return f"{size // 1024**2}Mi" if size and size % 1024**2 == 0 else str(size)


def _without_empty(resources: Json) -> Json:
    return {kind: amounts for kind, amounts in resources.items() if amounts}


DEMONSTRATIONS_FOLDER = "/run/rlrun-demonstrations"
"""Folder of the file, and of the code's home and temporary files, which no other container reads."""
FILE: Json = {"name": DEMONSTRATIONS_VARIABLE, "value": f"{DEMONSTRATIONS_FOLDER}/{DEMONSTRATIONS_FILE}"}
READ: Json = {"name": DEMONSTRATIONS_CONTAINER, "mountPath": DEMONSTRATIONS_FOLDER, "readOnly": True}
"""Variable and mount of the container that creates the model."""
_POD_NAME: tuple[Json, ...] = ({"name": "RLRUN_POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},)
"""Variable with the name of a trainer's pod: only the first one creates the model. For an orchestrator's pod the number in its name is
its attempt."""
_SIZE_LIMIT = "10Gi"


def has_demonstrations(ctx: RunContext) -> bool:
    """Return whether the run creates a tiny model with a warm-up."""
    tiny = ctx.spec.model.tiny
    return ctx.model_maker is not None and tiny is not None and tiny.warmup_environment is not None


def demonstrations_volumes(ctx: RunContext) -> list[Json]:
    """Return the volume of the file."""
    return (
        [{"name": DEMONSTRATIONS_CONTAINER, "emptyDir": {"sizeLimit": _SIZE_LIMIT}}] if has_demonstrations(ctx) else []
    )


def written_folders(ctx: RunContext) -> list[str]:
    """Return the folders of the run's volume that the container writes, as the pods see them."""
    return (
        [f"{ctx.storage.mount_path}/{path}" for path in container_parts.hub_data(ctx)]
        if has_demonstrations(ctx)
        else []
    )


def container_mounts(ctx: RunContext, role: Role) -> list[Json]:
    """Return the mounts of the container."""
    return [
        container_parts.run_mount(ctx) | {"readOnly": True},
        *(container_parts.mount_part(ctx, path) for path in container_parts.hub_data(ctx)),
        {"name": DEMONSTRATIONS_CONTAINER, "mountPath": DEMONSTRATIONS_FOLDER},
        *mounts_of_the_user(ctx, role, taken={DEMONSTRATIONS_FOLDER}),
    ]


def config_maps(sources: Sequence[EnvFromSource]) -> Iterator[Json]:
    """Yield the ConfigMaps of a role's `envFrom`."""
    for source in sources:
        if source.config_map_ref is not None:
            yield source.config_map_ref.model_dump(by_alias=True, exclude_none=True)


def container_variables(ctx: RunContext, own: Sequence[EnvVar], sources: Sequence[EnvFromSource]) -> list[Json]:
    """Return the variables of the container: the operator's own, and those of the role that an environment may have.

    Args:
        ctx: the run.
        own: `env` of the role.
        sources: `envFrom` of the role.
    """
    tiny = ctx.spec.model.tiny
    assert tiny is not None
    values = {
        "HOME": f"{DEMONSTRATIONS_FOLDER}/home",
        "TMPDIR": f"{DEMONSTRATIONS_FOLDER}/tmp",
        "USER": "rlrun",
        "HF_HOME": container_parts.hub_home(ctx),
        "OMP_NUM_THREADS": "1",
        "NVIDIA_VISIBLE_DEVICES": "void",
        "RLRUN_MODEL_FOLDER": str(RunPaths(Path(ctx.folder)).model),
        # The kubelet replaces $(NAME) in values, and $$ by $.
        "RLRUN_WARMUP": tiny.model_dump_json().replace("$", "$$"),
    }
    named = list(names_in_arguments(tiny.warmup_environment or "", tiny.warmup_args))
    allowed = {variable.name for variable in own if is_passed(variable.name, named)} - values.keys()
    return [
        *({"name": name, "value": value} for name, value in values.items()),
        *(_POD_NAME if ctx.model_maker == "trainer" else ()),
        *(v.model_dump(by_alias=True, exclude_none=True) for v in own if v.name in allowed),
        *_candidate_secrets([name for name in named if name not in allowed], sources),
    ]


def _candidate_secrets(names: Sequence[str], sources: Sequence[EnvFromSource]) -> Iterator[Json]:
    """Yield the keys of Secrets that may contain a variable of the environment, such as the hub's token, but no other keys of these
    Secrets.

    A list of variables contains each name once, so each candidate has a unique name (`rlrun.pod.preparation.CANDIDATE`).
    """
    for number, source in enumerate(sources):
        prefix = source.prefix or ""
        for name in dict.fromkeys(names):
            if source.secret_ref is not None and name.startswith(prefix) and name != prefix:
                selector = {"name": source.secret_ref.name, "key": name.removeprefix(prefix), "optional": True}
                yield {"name": f"RLRUN_CANDIDATE_{number:03}_{name}", "valueFrom": {"secretKeyRef": selector}}
