"""Container that environments without an image share by default, in the orchestrator's pod.

It separates code of users from the run's key, the token of the Lease and the keys of trackers. All environments share it, because each
container needs a Python process: 20 environments would need 20. Landlock separates the environments within it, like processes in the
orchestrator's container. It has the same view of the run's volume as the orchestrator's container, but only writes the hub's caches of
data. The orchestrator sends each environment the variables that it may have.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set

from rlrun.api.kubernetes import read_amount
from rlrun_operator.names import Role
from rlrun_operator.render import volume
from rlrun_operator.render.context import RunContext
from rlrun_operator.render.environments import ENVIRONMENTS_FOLDER
from rlrun_operator.render.placement import role_block
from rlrun_operator.state import Json, Manifest

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
    return [f"{ctx.storage.mount_path}/{path}" for path in volume.hub_data(ctx)] if has_shared(ctx) else []


def shared_mounts(ctx: RunContext) -> list[Json]:
    """Return the mounts of the container."""
    return [
        volume.run_mount(ctx) | {"readOnly": True},
        *(volume.mount_part(ctx, path) for path in volume.hub_data(ctx)),
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
