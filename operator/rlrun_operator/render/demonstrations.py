"""Init container with the code of a tiny model's warm-up environment (`model.tiny.warmupEnvironment`).

The next container, which creates the model, has the run's key and its configuration, and writes the run's folder. Therefore the code of
the environment runs before it, in a container without these, and writes a file with conversations. This container has the mounts of an
environment: the run's volume for reading, and the hub's caches of data for writing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from rlrun.api.kubernetes import EnvFromSource, EnvVar
from rlrun.config.environment_variables import is_passed, names_in_arguments
from rlrun.protocol.files.paths import RunPaths
from rlrun.runtime.bootstrap import DEMONSTRATIONS_FILE, DEMONSTRATIONS_VARIABLE
from rlrun_operator.names import DEMONSTRATIONS_CONTAINER, Role
from rlrun_operator.render import shared_environments, volume
from rlrun_operator.render.context import RunContext
from rlrun_operator.state import Json

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
    return [f"{ctx.storage.mount_path}/{path}" for path in volume.hub_data(ctx)] if has_demonstrations(ctx) else []


def mounts(ctx: RunContext, role: Role) -> list[Json]:
    """Return the mounts of the container."""
    return [
        volume.run_mount(ctx) | {"readOnly": True},
        *(volume.mount_part(ctx, path) for path in volume.hub_data(ctx)),
        {"name": DEMONSTRATIONS_CONTAINER, "mountPath": DEMONSTRATIONS_FOLDER},
        *shared_environments.mounts_of_the_user(ctx, role, taken={DEMONSTRATIONS_FOLDER}),
    ]


def config_maps(sources: Sequence[EnvFromSource]) -> Iterator[Json]:
    """Yield the ConfigMaps of a role's `envFrom`."""
    for source in sources:
        if source.config_map_ref is not None:
            yield source.config_map_ref.model_dump(by_alias=True, exclude_none=True)


def variables(ctx: RunContext, own: Sequence[EnvVar], sources: Sequence[EnvFromSource]) -> list[Json]:
    """Return the variables of the container: ours, and those of the role that an environment may have.

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
        "HF_HOME": volume.hub_home(ctx),
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
        *_candidates([name for name in named if name not in allowed], sources),
    ]


def _candidates(names: Sequence[str], sources: Sequence[EnvFromSource]) -> Iterator[Json]:
    """Yield the keys of Secrets that may contain a variable of the environment, such as the hub's token, but no other keys of these
    Secrets.

    A list of variables contains each name once, so each candidate has a unique name (`rlrun.pod.start.demonstrations.CANDIDATE`).
    """
    for number, source in enumerate(sources):
        prefix = source.prefix or ""
        for name in dict.fromkeys(names):
            if source.secret_ref is not None and name.startswith(prefix) and name != prefix:
                selector = {"name": source.secret_ref.name, "key": name.removeprefix(prefix), "optional": True}
                yield {"name": f"RLRUN_CANDIDATE_{number:03}_{name}", "valueFrom": {"secretKeyRef": selector}}
