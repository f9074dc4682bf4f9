"""Mounts of the run's volume: the whole volume is readable, and the run's own folders are writable."""

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
