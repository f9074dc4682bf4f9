"""Process of each role: its command, its environment and its configuration. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from rlrun.config.models.checkpoint import ResumeConfig
from rlrun.config.models.roles import orchestrator_module
from rlrun.config.models.run import RunConfig
from rlrun.custom import SAFE_PATH_VARIABLE
from rlrun.pod.role.network import interface_of
from rlrun.pod.settings import PodSettings
from rlrun.protocol.files.failures import ERROR_DIR_VARIABLE, ROLE_ENVIRONMENT, RoleError
from rlrun.protocol.files.paths import Role
from rlrun.runtime import exit_codes, extras
from rlrun.runtime.bootstrap import module_command
from rlrun.trainer.ranks.launch import Nodes, torchrun_command

_CPU_IMAGES = "images for CPUs (`make images ACCELERATOR=cpu` builds them)"
EVERYWHERE = "0.0.0.0"
"""In a pod every role listens on all addresses: probes and the other roles come from outside; keys and network policies guard it."""
EVERYWHERE6 = "::"
"""The same where pods have IPv6 addresses; a listener on it takes IPv4, too."""


def everywhere(pod_ip: str | None) -> str:
    """Address to listen on; `pod_ip`: of the pod, None where it is not known."""
    return EVERYWHERE6 if pod_ip is not None and ":" in pod_ip else EVERYWHERE


def config_in_pod(config: RunConfig, *, restart: bool, pod_ip: str | None = None) -> RunConfig:
    """The configuration as this pod's process reads it.

    Args:
        config: of the run.
        restart: earlier attempts of this very run have begun. `checkpoint.resume` says where the run starts; from then on it goes on from
            its newest checkpoint, else policy Never would forbid every restart and policy Step would undo it. `fromRun` stays: until there
            is such a checkpoint it says where to begin.
        pod_ip: address of the pod.
    """
    here = {"host": everywhere(pod_ip)}
    trainer = config.trainer.model_copy(update=here)
    if restart:
        given = trainer.checkpoint.resume
        resume = ResumeConfig(from_run=given.from_run, from_step=given.from_step)
        checkpoint = trainer.checkpoint.model_copy(update={"resume": resume})
        trainer = trainer.model_copy(update={"checkpoint": checkpoint})
    return config.model_copy(
        update={
            "trainer": trainer,
            "inference": None if config.inference is None else config.inference.model_copy(update=here),
            "orchestrator": config.orchestrator.model_copy(update=here),
        }
    )


def role_command(role: Role, pod: PodSettings, config: RunConfig, config_file: Path) -> list[str]:
    """The command line of a role's process.

    Args:
        role: which role.
        pod: the container.
        config: of the run.
        config_file: what the process reads.

    Raises:
        RoleError: the pod is no member of the trainer's group, or its image has an engine for other machines.
    """
    if role == "trainer":
        check_membership(pod, config)
        return torchrun_command(
            config.trainer,
            config_file=config_file,
            rendezvous_port=pod.master_port,
            attempt=pod.attempt,
            nodes=Nodes(pod.nodes, pod.ordinal, pod.master_addr),
        )
    if role == "inference" and config.inference is not None:
        check_engine(config.inference.gpus_per_replica)
    module = orchestrator_module(config.trainer.task) if role == "orchestrator" else "rlrun.inference"
    return config_command(module, config_file)


def model_command(config_file: Path) -> list[str]:
    """The command line that makes the tiny model."""
    return config_command("rlrun.trainer.modeling.tiny_model", config_file)


def config_command(module: str, config_file: Path) -> list[str]:
    """The command line of a module that reads the run's configuration."""
    return module_command(module, ["--config", str(config_file)])


@dataclass(frozen=True)
class Programs:
    """Command lines of a container's processes; an image with roles of its own has others (`rlrun.pod.main.main`)."""

    role: Callable[[Role, PodSettings, RunConfig, Path], list[str]] = role_command
    """As `role_command`."""
    model: Callable[[Path], list[str]] = model_command
    """As `model_command`."""


def check_membership(pod: PodSettings, config: RunConfig) -> None:
    """Check that a trainer's pod belongs to its group.

    Raises:
        RoleError: the group has another number of pods, or this one is beyond it.
    """
    if pod.nodes != config.trainer.replicas:
        raise RoleError(
            f"RLRUN_NNODES is {pod.nodes}, but the configuration's trainer.replicas is {config.trainer.replicas}",
            exit_codes.CONFIGURATION,
        )
    if pod.ordinal >= pod.nodes:
        raise RoleError(f"{pod.pod_name} is beyond the trainer's {pod.nodes} pods", exit_codes.CONFIGURATION)


def check_engine(gpus_per_replica: int) -> None:
    """Check that the image's engine computes on what the pod has.

    Raises:
        RoleError: it is the build for GPUs and the pod has none, or the other way round; in the words of `rlrun local`.
    """
    wrong = extras.wrong_engine(gpus_per_replica)
    if wrong is None:
        return
    what, images = wrong.partition("; ")[0], "`make images` builds them" if gpus_per_replica else _CPU_IMAGES
    fix = f"use images for GPUs ({images}) or remove it" if gpus_per_replica else f"set it to 1, or use {images}"
    raise RoleError(f"{what}; {fix}", exit_codes.CONFIGURATION)


def role_environment(role: Role, pod: PodSettings, env: Mapping[str, str], errors: Path) -> dict[str, str]:
    """The environment of a role's process.

    Args:
        role: which role.
        pod: the container.
        env: of this process; what it sets stays.
        errors: folder of this start's `error.json`.
    """
    defaults = {
        "OMP_NUM_THREADS": "1",  # the processes of a pod share its cores; more threads only fight
        **ROLE_ENVIRONMENT,
        # The image's user has no entry in /etc/passwd, which getpass.getuser() of torch and vLLM wants without these.
        "USER": "rlrun",
        "LOGNAME": "rlrun",
        # No module comes from a folder that code in this container can write: neither the working directory nor the home's site-packages.
        SAFE_PATH_VARIABLE: "1",
        "PYTHONNOUSERSITE": "1",
    }
    interface = interface_of(pod.pod_ip) if role == "trainer" and pod.pod_ip else None
    if interface is not None:
        defaults["GLOO_SOCKET_IFNAME"] = interface
        if pod.nodes > 1:
            defaults["NCCL_SOCKET_IFNAME"] = interface
    return {**defaults, **env, ERROR_DIR_VARIABLE: str(errors)}
