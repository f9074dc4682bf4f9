"""Process of each role: its command, its environment and its configuration.

Pure, except for the check of the image's engine and the lookup of the network interface with the pod's address: libraries for collectives
need names, not addresses.
"""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from rlrun.config.models.checkpoint import ResumeConfig
from rlrun.config.models.roles import orchestrator_module
from rlrun.config.models.run_config import RunConfig
from rlrun.custom import SAFE_PATH_VARIABLE
from rlrun.pod.container_settings import PodSettings
from rlrun.protocol.files.failures import ERROR_DIR_VARIABLE, ROLE_ENVIRONMENT, RoleError
from rlrun.protocol.files.paths import Role
from rlrun.runtime import exit_codes, extras
from rlrun.runtime.bootstrap import module_command
from rlrun.trainer.ranks.launch import Nodes, torchrun_command

_SIOCGIFADDR = 0x8915
_IF_INET6 = Path("/proc/net/if_inet6")


def interface_of(address: str) -> str | None:
    """Return the name of the interface with this IPv4 or IPv6 address, or None."""
    try:
        wanted = ipaddress.ip_address(address)
    except ValueError:
        return None
    if wanted.version == 6:
        return _find_ipv6_interface(wanted)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as query:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(query, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:  # an interface without an IPv4 address
                continue
            if socket.inet_ntoa(answer[20:24]) == str(wanted):
                return name
    return None


def _find_ipv6_interface(wanted: ipaddress.IPv4Address | ipaddress.IPv6Address) -> str | None:
    try:
        lines = _IF_INET6.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        digits, *_, name = line.split()
        if ipaddress.ip_address(bytes.fromhex(digits)) == wanted:
            return name
    return None


_CPU_IMAGES = "images for CPUs (`make images ACCELERATOR=cpu` builds them)"
EVERYWHERE = "0.0.0.0"
"""In a pod every role listens on all addresses: probes and the other roles are outside; keys and network policies protect it."""
EVERYWHERE6 = "::"
"""The same for pods with IPv6 addresses; such a listener also accepts IPv4."""


def listen_address(pod_ip: str | None) -> str:
    """Return the address to listen on; `pod_ip`: address of the pod, or None if unknown."""
    return EVERYWHERE6 if pod_ip is not None and ":" in pod_ip else EVERYWHERE


def config_in_pod(config: RunConfig, *, restart: bool, pod_ip: str | None = None) -> RunConfig:
    """Return the configuration for this pod's process.

    Args:
        config: configuration of the run.
        restart: whether earlier attempts of this run have started. `checkpoint.resume` determines only the first start; later the run
            continues from its newest checkpoint, because policy Never would forbid every restart and policy Step would undo it. `fromRun`
            stays: it determines the start until there is such a checkpoint.
        pod_ip: address of the pod.
    """
    here = {"host": listen_address(pod_ip)}
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
    """Return the command line of a role's process.

    Args:
        role: the role.
        pod: settings of the container.
        config: configuration of the run.
        config_file: file that the process reads.

    Raises:
        RoleError: the pod does not belong to the trainer's group, or its image has an engine for other machines.
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
    """Return the command line that creates the tiny model."""
    return config_command("rlrun.trainer.modeling.tiny_model", config_file)


def plain_copy_command(config_file: Path) -> list[str]:
    """Return the command line that writes the plain copy of a quantized model."""
    return config_command("rlrun.trainer.plain_copy", config_file)


def config_command(module: str, config_file: Path) -> list[str]:
    """Return the command line of a module that reads the run's configuration."""
    return module_command(module, ["--config", str(config_file)])


@dataclass(frozen=True)
class Programs:
    """Command lines of a container's processes; an image with its own roles replaces them (`rlrun.pod.pod_command.main`)."""

    role: Callable[[Role, PodSettings, RunConfig, Path], list[str]] = role_command
    """Function like `role_command`."""
    model: Callable[[Path], list[str]] = model_command
    """Function like `model_command`."""
    plain_copy: Callable[[Path], list[str]] | None = plain_copy_command
    """Function like `plain_copy_command`; None: the image reads no weights."""


def check_membership(pod: PodSettings, config: RunConfig) -> None:
    """Check that a trainer's pod belongs to its group.

    Raises:
        RoleError: the group has another number of pods, or this pod is outside of it.
    """
    if pod.nodes != config.trainer.replicas:
        raise RoleError(
            f"RLRUN_NNODES is {pod.nodes}, but the configuration's trainer.replicas is {config.trainer.replicas}",
            exit_codes.CONFIGURATION,
        )
    if pod.ordinal >= pod.nodes:
        raise RoleError(f"{pod.pod_name} does not belong to the trainer's {pod.nodes} pods", exit_codes.CONFIGURATION)


def check_engine(gpus_per_replica: int) -> None:
    """Check that the image's engine fits the pod's hardware.

    Raises:
        RoleError: it is the build for GPUs and the pod has none, or vice versa; the message is that of `rlrun local`.
    """
    wrong = extras.wrong_engine(gpus_per_replica)
    if wrong is None:
        return
    what, images = wrong.partition("; ")[0], "`make images` builds them" if gpus_per_replica else _CPU_IMAGES
    fix = f"use images for GPUs ({images}) or remove it" if gpus_per_replica else f"set it to 1, or use {images}"
    raise RoleError(f"{what}; {fix}", exit_codes.CONFIGURATION)


def role_environment(role: Role, pod: PodSettings, env: Mapping[str, str], errors: Path) -> dict[str, str]:
    """Return the environment of a role's process.

    Args:
        role: the role.
        pod: settings of the container.
        env: environment of this process; it overrides the defaults.
        errors: folder of this start's `error.json`.
    """
    defaults = {
        "OMP_NUM_THREADS": "1",  # the processes of a pod share its cores; more threads would only compete
        **ROLE_ENVIRONMENT,
        # The image's user has no entry in /etc/passwd; without these, getpass.getuser() in torch and vLLM fails.
        "USER": "rlrun",
        "LOGNAME": "rlrun",
        # Never import from a folder that code in this container can write: neither the working directory nor the home's site-packages.
        SAFE_PATH_VARIABLE: "1",
        "PYTHONNOUSERSITE": "1",
    }
    interface = interface_of(pod.pod_ip) if role == "trainer" and pod.pod_ip else None
    if interface is not None:
        defaults["GLOO_SOCKET_IFNAME"] = interface
        if pod.nodes > 1:
            defaults["NCCL_SOCKET_IFNAME"] = interface
    return {**defaults, **env, ERROR_DIR_VARIABLE: str(errors)}
