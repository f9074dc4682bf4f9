"""The first process of the stub image's containers: `rlrun-pod` with these programs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

# As in `rlrun.pod.pod_command`: slow imports follow the setup of signal handlers.
if TYPE_CHECKING:
    from rlrun.config.models.run_config import RunConfig
    from rlrun.pod.container_settings import PodSettings
    from rlrun.pod.role_commands import Programs
    from rlrun.protocol.files.paths import Role

PACKAGE = "tests.support.stub"


def role_command(role: Role, pod: PodSettings, config: RunConfig, config_file: Path) -> list[str]:
    """Return the command line of a role's process: a stub, except for the real orchestrator.

    Raises:
        RoleError: the pod is not a member of the trainer's group.
    """
    from rlrun.pod import role_commands

    if role == "orchestrator":
        return role_commands.role_command(role, pod, config, config_file)
    if role == "trainer":
        role_commands.check_membership(pod, config)
    return role_commands.config_command(f"{PACKAGE}.{role}", config_file)


def model_command(config_file: Path) -> list[str]:
    """Return the command line that makes the model folder."""
    from rlrun.pod import role_commands

    return role_commands.config_command(f"{PACKAGE}.model", config_file)


def programs() -> Programs:
    """Return programs of the stub image's containers."""
    from rlrun.pod.role_commands import Programs

    return Programs(role_command, model_command, plain_copy=None)
