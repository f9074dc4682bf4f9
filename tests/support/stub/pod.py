"""The first process of the stub image's containers: `rlrun-pod` with these programs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

# As in `rlrun.pod.pod_command`: what takes time is imported once signals are handled.
if TYPE_CHECKING:
    from rlrun.config.models.run_config import RunConfig
    from rlrun.pod.container_settings import PodSettings
    from rlrun.pod.role_commands import Programs
    from rlrun.protocol.files.paths import Role

PACKAGE = "tests.support.stub"


def role_command(role: Role, pod: PodSettings, config: RunConfig, config_file: Path) -> list[str]:
    """The command line of a role's process: a stub, but for the orchestrator, which is the real one.

    Raises:
        RoleError: the pod is no member of the trainer's group.
    """
    from rlrun.pod import role_commands

    if role == "orchestrator":
        return role_commands.role_command(role, pod, config, config_file)
    if role == "trainer":
        role_commands.check_membership(pod, config)
    return role_commands.config_command(f"{PACKAGE}.{role}", config_file)


def model_command(config_file: Path) -> list[str]:
    """The command line that makes the model folder."""
    from rlrun.pod import role_commands

    return role_commands.config_command(f"{PACKAGE}.model", config_file)


def programs() -> Programs:
    """Programs of the stub image's containers."""
    from rlrun.pod.role_commands import Programs

    return Programs(role_command, model_command)
