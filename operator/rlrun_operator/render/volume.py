"""Mounts of the run's volume: all of it can be read, and what the run itself writes can be written."""

from __future__ import annotations

from pathlib import Path

from rlrun.protocol.files.paths import RunPaths
from rlrun.protocol.files.shared import join_file
from rlrun_operator.names import Role
from rlrun_operator.render.context import RunContext
from rlrun_operator.state import Json

DATA = "data"
"""Name of the volume in every pod."""
HUB_FOLDER = ".huggingface"
"""Cache of models and data sets: in the run's folder, or on the volume for all runs. No run can have this name."""

HUB_DATA = ("hub", "datasets", "assets", "xet")
"""Folders of data of the hub's cache. Next to them may lie code (`modules`) and a token."""


def hub_home(ctx: RunContext) -> str:
    """Folder of the hub's cache, as the pods see it."""
    return f"{ctx.storage.mount_path if ctx.storage.hub_cache == 'Volume' else ctx.folder}/{HUB_FOLDER}"


def hub_data(ctx: RunContext) -> list[str]:
    """Folders of data of the hub's cache, as paths below the mount.

    Of a cache for all runs it is the whole folder: somebody else may own it, so that folders in it cannot be made.
    """
    if ctx.storage.hub_cache == "Volume":
        return [HUB_FOLDER]
    return [f"{ctx.name}/{HUB_FOLDER}/{name}" for name in HUB_DATA]


def role_mounts(ctx: RunContext, role: Role) -> list[Json]:
    """Mounts of a role's container."""
    if _writes_all(ctx, role):
        return [run_mount(ctx)]
    return [run_mount(ctx) | {"readOnly": True}, *(mount_part(ctx, path) for path in _written_folders(ctx))]


def folders_to_make(ctx: RunContext) -> list[str]:
    """Folders that have to be there before a container that mounts them starts: the kubelet would make them as root."""
    return [f"{ctx.storage.mount_path}/{path}" for path in _written_folders(ctx)]


def run_mount(ctx: RunContext) -> Json:
    """Mount of all that the run may see of the volume, with the right to write."""
    mount = {"name": DATA, "mountPath": ctx.storage.mount_path}
    return mount if ctx.storage.sub_path is None else mount | {"subPath": ctx.storage.sub_path}


def mount_part(ctx: RunContext, path: str) -> Json:
    """Mount of a file or folder of it, where `run_mount` has it, with the right to write."""
    above = f"{ctx.storage.sub_path}/" if ctx.storage.sub_path is not None else ""
    return {"name": DATA, "mountPath": f"{ctx.storage.mount_path}/{path}", "subPath": f"{above}{path}"}


def _writes_all(ctx: RunContext, role: Role) -> bool:
    """A trainer that takes guests writes their checkpoints, and learns their names while it runs."""
    return role == "trainer" and ctx.spec.trainer.lora is not None and ctx.spec.trainer.lora.slots > 1


def _written_folders(ctx: RunContext) -> list[str]:
    """Folders that the run writes, below what is mounted of the volume."""
    paths = [ctx.name]
    if ctx.host is not None:
        paths.append(str(join_file(RunPaths(Path(ctx.host.name)), ctx.name).parent))  # where it asks for its slot
    if ctx.storage.hub_cache == "Volume":
        paths.append(HUB_FOLDER)
    return paths
