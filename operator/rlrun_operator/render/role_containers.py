"""Containers of the roles: command, environment variables, mounts and resources."""

from __future__ import annotations

from rlrun.config.models.file_mark import VARIABLE as CONFIG_MARK
from rlrun.protocol.messages import endpoints
from rlrun.runtime import exit_codes
from rlrun.runtime.bootstrap import SHARED_SOCKET_VARIABLE, SOCKETS_VARIABLE
from rlrun_operator.names import DEMONSTRATIONS_CONTAINER, FOLDER_CONTAINER, MODEL_CONTAINER, Role
from rlrun_operator.render import container_parts, environments
from rlrun_operator.render.container_parts import container_probes
from rlrun_operator.render.network import without_proxy
from rlrun_operator.render.pod_placement import gpus_per_pod, role_block
from rlrun_operator.render.render_context import RunContext
from rlrun_operator.render.run_objects import API_KEY, CONFIG_FILE
from rlrun_operator.state import Json

CONFIG_FOLDER = "/etc/rlrun"
CREDENTIALS_FOLDER = "/var/run/secrets/rlrun"
"""Folder with token and certificate for the API server; only in the orchestrator."""
HOME = "/home/rlrun"
CONFIG, CREDENTIALS, SHARED_MEMORY = "config", "credentials", "shm"
"""Names of volumes, in addition to the run's volume."""
SCRATCH = {"tmp": "/tmp", "home": HOME, "state": "/run/rlrun"}
"""Empty folders of the pod: name and mount path of the volume. `state` contains the marker of the trainer's first start."""
SCRATCH_LIMIT = "50Gi"
"""Size limit of each of these folders, which hold caches of compilers. The kubelet evicts a pod that exceeds it."""
ENGINE_ATTEMPT = 1
"""Attempt in the variables of engines, which outlive attempts: their pods must not differ between attempts. The number only selects the
folder of their logs; the orchestrator of each attempt sets the served weights."""

HEARS_SIGNALS = "; ".join(
    (
        'trap "exit 143" TERM INT',
        f'command -v "$0" >/dev/null || {{ echo "the image has no $0: it needs the package rlrun" >&2; exit {exit_codes.CONFIGURATION}; }}',
        'env --block-signal=TERM true 2>/dev/null && exec env --block-signal=TERM --block-signal=INT "$0" "$@"',
        'exec "$0" "$@"',
    )
)
"""Shell code that runs a command with SIGTERM and SIGINT blocked, hence pending, until that command has handlers for them.

The kernel drops a signal that a container's first process has no handler for. Python needs up to a second to install one, and a trainer's
container often restarts just when its pod is deleted: it would then run until the end of the grace period, because a kubelet does not
always apply a later, shorter period. `env` can block signals since coreutils 8.31; with an older version the gap remains."""


def role_container(ctx: RunContext, role: Role) -> dict[str, object]:
    """Return the main container of a role; its name is the role."""
    ports: dict[Role, dict[str, int]] = {
        "trainer": {
            "channel": endpoints.TRAINER_PORT,
            "rendezvous": endpoints.RENDEZVOUS_PORT,
            "health": endpoints.POD_PORT,
        },
        "inference": {"http": endpoints.ENGINE_PORT, "health": endpoints.POD_PORT},
        "orchestrator": {"metrics": endpoints.ORCHESTRATOR_PORT},
    }
    if ctx.colocated:
        ports["trainer"]["http"] = endpoints.ENGINE_PORT
    container = _build_container(ctx, role, name=role, command=role) | {
        "ports": [{"name": name, "containerPort": port} for name, port in ports[role].items()],
        **container_probes(role),
    }
    resources = _container_resources(ctx, role, with_gpus=True)
    if role == "orchestrator" and environments.has_shared(ctx):
        resources, _ = environments.split_resources(resources)
    return container | ({"resources": resources} if resources else {})


def folder_container(ctx: RunContext, role: Role) -> dict[str, object]:
    """Return the init container that creates the writable folders as the run's user. Only this container can write to the whole volume."""
    container: dict[str, object] = {
        "name": FOLDER_CONTAINER,
        **_image_fields(ctx, role),
        "command": ["sh", "-c", HEARS_SIGNALS, "rlrun-pod", "make-folders", *_make_folders(ctx, role)],
        "volumeMounts": [container_parts.run_mount(ctx)],
        "securityContext": container_parts.CONTAINER,
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }
    resources = _container_resources(ctx, role, with_gpus=False)
    return container | ({"resources": resources} if resources else {})


def _make_folders(ctx: RunContext, role: Role) -> list[str]:
    shared = environments.shared_folders(ctx) if role == "orchestrator" else []
    written = environments.written_folders(ctx) if role == ctx.model_maker else []
    return list(dict.fromkeys([*container_parts.folders_to_make(ctx), *shared, *written]))


def environments_container(ctx: RunContext) -> list[dict[str, object]]:
    """Return the native sidecar of the orchestrator's pod for environments without an image; empty if the run has no such environment."""
    if not environments.has_shared(ctx):
        return []
    _, resources = environments.split_resources(_container_resources(ctx, "orchestrator", with_gpus=True))
    values = {
        "HOME": HOME,
        "USER": "rlrun",
        "HF_HOME": container_parts.hub_home(ctx),
        "OMP_NUM_THREADS": "1",
        **({} if any("/" in name for name in resources.get("limits", ())) else {"NVIDIA_VISIBLE_DEVICES": "void"}),
    }
    container: dict[str, object] = {
        "name": environments.NAME,
        **_image_fields(ctx, "orchestrator"),
        "restartPolicy": "Always",
        "command": ["sh", "-c", HEARS_SIGNALS, "rlrun-pod", "environments", environments.SOCKET],
        "env": [{"name": name, "value": value} for name, value in values.items()],
        "volumeMounts": environments.shared_mounts(ctx),
        "securityContext": container_parts.CONTAINER,
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }
    return [container | ({"resources": resources} if resources else {})]


def demonstrations_container(ctx: RunContext, role: Role) -> list[dict[str, object]]:
    """Return the init container with the code of a tiny model's warm-up environment; empty if the model has no warm-up.

    Like the container of environments, it has no secrets of the run.
    """
    if not environments.has_demonstrations(ctx):
        return []
    own = role_block(ctx.spec, role)
    sources = [{"configMapRef": source} for source in environments.config_maps(own.env_from)]
    container: dict[str, object] = {
        "name": DEMONSTRATIONS_CONTAINER,
        **_image_fields(ctx, role),
        "command": ["sh", "-c", HEARS_SIGNALS, "rlrun-pod", "demonstrations", environments.DEMONSTRATIONS_FOLDER],
        "env": without_proxy(ctx.spec, environments.container_variables(ctx, own.env, own.env_from)),
        "volumeMounts": environments.container_mounts(ctx, role),
        "securityContext": container_parts.CONTAINER,
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }
    resources = _container_resources(ctx, role, with_gpus=False)
    return [container | ({"envFrom": sources} if sources else {}) | ({"resources": resources} if resources else {})]


def model_container(ctx: RunContext, role: Role) -> dict[str, object]:
    """Return the init container that creates the tiny model: in the trainer's first pod, for which the others wait, or in the
    orchestrator's.

    It requests the resources of the role except GPUs: init containers do not add to the requests of the pod's containers.
    """
    container = _build_container(ctx, role, name=MODEL_CONTAINER, command="model")
    if environments.has_demonstrations(ctx):
        container["env"] = [*container["env"], environments.FILE]
        container["volumeMounts"] = [*container["volumeMounts"], environments.READ]
    resources = _container_resources(ctx, role, with_gpus=False)
    return container | ({"resources": resources} if resources else {})


def _build_container(ctx: RunContext, role: Role, *, name: str, command: str) -> Json:
    own = role_block(ctx.spec, role)
    container: Json = {
        "name": name,
        **_image_fields(ctx, role),
        "command": ["sh", "-c", HEARS_SIGNALS, "rlrun-pod", command],
        "env": _environment_variables(ctx, role, with_trackers=command == "orchestrator"),
        "volumeMounts": _container_mounts(ctx, role),
        "securityContext": container_parts.CONTAINER,
        # The role's own message, or the end of its log if it could not write one.
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }
    if own.env_from:
        container["envFrom"] = [source.model_dump(by_alias=True, exclude_none=True) for source in own.env_from]
    return container


def _image_fields(ctx: RunContext, role: Role) -> dict[str, str]:
    """Return image and pull policy. Colocated trainers use the engines' image, which contains the trainer's packages too; the trainer's
    image does not contain those of engines."""
    own = role_block(ctx.spec, role)
    whose: Role = "inference" if role == "trainer" and ctx.colocated else role
    policy = own.image_pull_policy or (None if own.image else ctx.settings.image_pull_policy)
    image = {"image": own.image or ctx.settings.images[whose]}
    return image if policy is None else image | {"imagePullPolicy": policy}


def _environment_variables(ctx: RunContext, role: Role, *, with_trackers: bool) -> list[Json]:
    """Return the variables of a container: ours, then those of the role's block, which replace ours. The block cannot set reserved
    names."""
    attempt = ENGINE_ATTEMPT if role == "inference" else ctx.attempt
    values = {
        "RLRUN_CONFIG": f"{CONFIG_FOLDER}/{CONFIG_FILE}",
        CONFIG_MARK: ctx.file_mark(role),
        "RLRUN_ATTEMPT": str(attempt),
        "HOME": HOME,
        "USER": "rlrun",  # names of caches contain it, and a custom image may lack our user
        "HF_HOME": container_parts.hub_home(ctx),
    }
    if role == "trainer":
        values |= {
            "RLRUN_NNODES": str(ctx.spec.trainer.replicas),
            "RLRUN_MASTER_ADDR": ctx.first_trainer,
            "RLRUN_MASTER_PORT": str(endpoints.RENDEZVOUS_PORT),
        }
    if role == "orchestrator":
        values["RLRUN_PROGRESS_LEASE"] = ctx.names.progress
        if environments.own_images(ctx):
            values[SOCKETS_VARIABLE] = environments.ENVIRONMENTS_FOLDER
        if environments.has_shared(ctx):
            values[SHARED_SOCKET_VARIABLE] = environments.SOCKET
    if not gpus_per_pod(ctx.spec, role):
        # Otherwise CUDA images show all GPUs of a node to a container that requested no GPU.
        values |= {"OMP_NUM_THREADS": "1", "NVIDIA_VISIBLE_DEVICES": "void"}
    fields = {
        "RLRUN_NAMESPACE": "metadata.namespace",
        "RLRUN_POD_NAME": "metadata.name",
        "RLRUN_POD_IP": "status.podIP",
    }
    ours: list[Json] = [
        *({"name": name, "value": value} for name, value in values.items()),
        *({"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}} for name, path in fields.items()),
        {"name": "RLRUN_API_KEY", "valueFrom": {"secretKeyRef": {"name": ctx.key_secret, "key": API_KEY}}},
        *(_tracker_keys(ctx) if with_trackers else ()),
    ]
    own = [variable.model_dump(by_alias=True, exclude_none=True) for variable in role_block(ctx.spec, role).env]
    return without_proxy(ctx.spec, list({variable["name"]: variable for variable in [*ours, *own]}.values()))


def _tracker_keys(ctx: RunContext) -> list[Json]:
    """Return the variables with the keys of trackers, each from its Secret. The container waits for a missing key unless it is optional."""
    found: list[Json] = []
    for secret in ctx.spec.tracking.secrets if ctx.spec.tracking is not None else ():
        optional = {"optional": True} if secret.reference.optional else {}
        for key in secret.keys:
            source = {"name": secret.reference.name, "key": key, **optional}
            found.append({"name": key, "valueFrom": {"secretKeyRef": source}})
    return found


def _container_mounts(ctx: RunContext, role: Role) -> list[Json]:
    mounts: list[Json] = [
        *container_parts.role_mounts(ctx, role),
        {"name": CONFIG, "mountPath": CONFIG_FOLDER, "readOnly": True},
        {"name": SHARED_MEMORY, "mountPath": "/dev/shm"},
        *({"name": name, "mountPath": path} for name, path in SCRATCH.items()),
    ]
    if role == "orchestrator":
        mounts.append({"name": CREDENTIALS, "mountPath": CREDENTIALS_FOLDER, "readOnly": True})
        mounts += environments.socket_mounts(ctx)
        mounts += environments.shared_socket_mounts(ctx)
    return mounts


def _container_resources(ctx: RunContext, role: Role, *, with_gpus: bool) -> Json:
    """Return the block's requests and limits with the GPUs of `gpusPerReplica`, which override GPUs in the block."""
    own, resource, count = (
        role_block(ctx.spec, role).resources,
        ctx.spec.placement.gpu_resource,
        gpus_per_pod(ctx.spec, role),
    )
    result = {}
    for kind, amounts in (("limits", own.limits), ("requests", own.requests)):
        merged = {name: str(amount) for name, amount in amounts.items()}
        if not with_gpus:
            merged.pop(resource, None)
        elif count:
            merged[resource] = str(count)
        if merged:
            result[kind] = merged
    return result
