"""A role's container: command, environment, mounts, resources."""

from __future__ import annotations

from typing import Any

from rlrun.config.rollout import EnvironmentConfig
from rlrun.protocol import endpoints
from rlrun.protocol.bootstrap import HOST_MODULE, SOCKETS_VARIABLE, START, socket_of
from rlrun_operator.build.context import RunContext
from rlrun_operator.build.objects import API_KEY, CONFIG_FILE
from rlrun_operator.build.probes import probes
from rlrun_operator.names import Role
from rlrun_operator.placement import block, gpus

CONFIG_FOLDER = "/etc/rlrun"
CREDENTIALS_FOLDER = "/var/run/secrets/rlrun"
"""Token and certificate of the API server; in the orchestrator alone."""
HOME = "/home/rlrun"
DATA, CONFIG, CREDENTIALS, SHARED_MEMORY = "data", "config", "credentials", "shm"
"""Names of the volumes."""
SCRATCH = {"tmp": "/tmp", "home": HOME, "state": "/run/rlrun"}
"""Empty folders of the pod: name of the volume, and where it is mounted. `state` holds the mark of the trainer's first start."""
HUB_FOLDER = ".huggingface"
"""Cache of models and data sets on the run's volume, shared by all runs there. No run can have this name."""
ENVIRONMENTS = "environments"
"""Volume of the orchestrator's pod, where environments have containers of their own: this package's code, and their sockets."""
ENVIRONMENTS_FOLDER = "/run/rlrun-environments"
CODE_FOLDER = f"{ENVIRONMENTS_FOLDER}/code"
ENGINE_ATTEMPT = 1
"""Engines outlive attempts, so their pods must not differ between them. The number names only the folder of their logs: what an engine
serves, it learns from the orchestrator of each attempt."""

_SECURITY = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "runAsNonRoot": True,
    "capabilities": {"drop": ["ALL"]},
}


def role_container(ctx: RunContext, role: Role) -> dict[str, Any]:
    """The container that is called after the role."""
    ports: dict[Role, dict[str, int]] = {
        "trainer": {
            "channel": endpoints.TRAINER_PORT,
            "rendezvous": endpoints.RENDEZVOUS_PORT,
            "health": endpoints.POD_PORT,
        },
        "inference": {"http": endpoints.ENGINE_PORT},
        "orchestrator": {"metrics": endpoints.ORCHESTRATOR_PORT},
    }
    if ctx.colocated:
        ports["trainer"] |= ports["inference"]
    container = _container(ctx, role, name=role, command=role) | {
        "ports": [{"name": name, "containerPort": port} for name, port in ports[role].items()],
        **probes(role),
    }
    resources = _resources(ctx, role, with_gpus=True)
    return container | ({"resources": resources} if resources else {})


def model_container(ctx: RunContext, role: Role) -> dict[str, Any]:
    """The init container that makes the tiny model; in the trainer's first pod, while the others wait for it, or in the orchestrator's.

    It asks for what the role asks for, GPUs apart: a pod's init containers cost nothing beyond its containers.
    """
    container = _container(ctx, role, name="model", command="model")
    resources = _resources(ctx, role, with_gpus=False)
    return container | ({"resources": resources} if resources else {})


def has_environment_containers(ctx: RunContext) -> bool:
    """Whether an environment has an image of its own."""
    return any(environment.image is not None for environment in ctx.spec.environments)


def environment_containers(ctx: RunContext) -> list[dict[str, Any]]:
    """Init containers of the orchestrator's pod: one that shares the code of this package, and a native sidecar for each environment
    that has an image. A sidecar has neither the run's key nor a token, and may only read the run's volume.
    """
    apart = [(i, e) for i, e in enumerate(ctx.spec.environments) if e.image is not None]
    own = ctx.spec.orchestrator
    shares = {
        "name": "environment-code",
        "image": own.image or ctx.settings.images["orchestrator"],
        "command": ["rlrun-pod", "share-code", CODE_FOLDER],
        "volumeMounts": [{"name": ENVIRONMENTS, "mountPath": ENVIRONMENTS_FOLDER}],
        "securityContext": _SECURITY,
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }
    policy = own.image_pull_policy or (None if own.image else ctx.settings.image_pull_policy)
    if policy is not None:
        shares["imagePullPolicy"] = policy
    return [shares, *(_environment_container(ctx, index, environment) for index, environment in apart)]


def _environment_container(ctx: RunContext, index: int, environment: EnvironmentConfig) -> dict[str, Any]:
    data = next(mount for mount in _mounts(ctx, "orchestrator") if mount["name"] == DATA)
    place = f"{ENVIRONMENTS_FOLDER}/{index}"
    return {
        "name": f"environment-{index}",
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
            {"name": "HOME", "value": place},
            {"name": "TMPDIR", "value": "/tmp"},
            {"name": "PYTHONUNBUFFERED", "value": "1"},
            {"name": "OMP_NUM_THREADS", "value": "1"},
        ],
        "volumeMounts": [
            data | {"readOnly": True},
            {"name": ENVIRONMENTS, "mountPath": ENVIRONMENTS_FOLDER},
            {"name": "tmp", "mountPath": "/tmp"},
        ],
        "securityContext": _SECURITY,
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }


def _container(ctx: RunContext, role: Role, *, name: str, command: str) -> dict[str, Any]:
    own = block(ctx.spec, role)
    policy = own.image_pull_policy or (None if own.image else ctx.settings.image_pull_policy)
    container: dict[str, Any] = {
        "name": name,
        "image": own.image or ctx.settings.images[_image(ctx, role)],
        "command": ["rlrun-pod", command],
        "env": _environment(ctx, role),
        "volumeMounts": _mounts(ctx, role),
        "securityContext": _SECURITY,
        # The role's own message; the end of its log when it could not write one.
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }
    if policy is not None:
        container["imagePullPolicy"] = policy
    if own.env_from:
        container["envFrom"] = [source.model_dump(by_alias=True, exclude_none=True) for source in own.env_from]
    return container


def _image(ctx: RunContext, role: Role) -> Role:
    """Whose image a role has: that of engines holds what the trainer needs too, and not the other way round."""
    return "inference" if role == "trainer" and ctx.colocated else role


def _environment(ctx: RunContext, role: Role) -> list[dict[str, Any]]:
    """Ours, then the block's, which replaces one of ours of the same name; the reserved ones cannot be in the block."""
    attempt = ENGINE_ATTEMPT if role == "inference" else ctx.attempt
    values = {
        "RLRUN_CONFIG": f"{CONFIG_FOLDER}/{CONFIG_FILE}",
        "RLRUN_ATTEMPT": str(attempt),
        "HOME": HOME,
        "USER": "rlrun",  # caches are named after it, and an image of another kind may not know our user
        "HF_HOME": f"{ctx.storage.mount_path}/{HUB_FOLDER}",
    }
    if role == "trainer":
        values |= {
            "RLRUN_NNODES": str(ctx.spec.trainer.replicas),
            "RLRUN_MASTER_ADDR": ctx.first_trainer,
            "RLRUN_MASTER_PORT": str(endpoints.RENDEZVOUS_PORT),
        }
    if role == "orchestrator":
        values["RLRUN_PROGRESS_LEASE"] = ctx.names.progress
        if has_environment_containers(ctx):
            values[SOCKETS_VARIABLE] = ENVIRONMENTS_FOLDER
    if not gpus(ctx.spec, role):
        # CUDA images show all of a node's GPUs to a container that asked for none.
        values |= {"OMP_NUM_THREADS": "1", "NVIDIA_VISIBLE_DEVICES": "void"}
    fields = {
        "RLRUN_NAMESPACE": "metadata.namespace",
        "RLRUN_POD_NAME": "metadata.name",
        "RLRUN_POD_IP": "status.podIP",
    }
    ours: list[dict[str, Any]] = [
        *({"name": name, "value": value} for name, value in values.items()),
        *({"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}} for name, path in fields.items()),
        {"name": "RLRUN_API_KEY", "valueFrom": {"secretKeyRef": {"name": ctx.key_secret, "key": API_KEY}}},
    ]
    own = [variable.model_dump(by_alias=True, exclude_none=True) for variable in block(ctx.spec, role).env]
    return list({variable["name"]: variable for variable in [*ours, *own]}.values())


def _mounts(ctx: RunContext, role: Role) -> list[dict[str, Any]]:
    storage = ctx.storage
    data = {"name": DATA, "mountPath": storage.mount_path}
    if storage.sub_path is not None:
        data["subPath"] = storage.sub_path
    mounts: list[dict[str, Any]] = [
        data,
        {"name": CONFIG, "mountPath": CONFIG_FOLDER, "readOnly": True},
        {"name": SHARED_MEMORY, "mountPath": "/dev/shm"},
        *({"name": name, "mountPath": path} for name, path in SCRATCH.items()),
    ]
    if role == "orchestrator":
        mounts.append({"name": CREDENTIALS, "mountPath": CREDENTIALS_FOLDER, "readOnly": True})
        if has_environment_containers(ctx):
            mounts.append({"name": ENVIRONMENTS, "mountPath": ENVIRONMENTS_FOLDER})
    return mounts


def _resources(ctx: RunContext, role: Role, *, with_gpus: bool) -> dict[str, Any]:
    """The block's requests and limits, and the GPUs of `gpusPerReplica`, which win over one that the block names itself."""
    own, resource, count = block(ctx.spec, role).resources, ctx.spec.placement.gpu_resource, gpus(ctx.spec, role)
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
