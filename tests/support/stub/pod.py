"""The first process of the stub image's containers: `rlrun-pod` with these programs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

# As in `rlrun.pod.main`: what takes time is imported once signals are handled.
if TYPE_CHECKING:
    from rlrun.config.models.run import RunConfig
    from rlrun.pod.role.roles import Programs
    from rlrun.pod.settings import PodSettings
    from rlrun.protocol.files.paths import Role

PACKAGE = "tests.support.stub"


def role_command(role: Role, pod: PodSettings, config: RunConfig, config_file: Path) -> list[str]:
    """The command line of a role's process: a stub, but for the orchestrator, which is the real one.

    Raises:
        RoleError: the pod is no member of the trainer's group.
    """
    from rlrun.pod.role import roles

    if role == "orchestrator":
        return roles.role_command(role, pod, config, config_file)
    if role == "trainer":
        roles.check_membership(pod, config)
    return roles.config_command(f"{PACKAGE}.{role}", config_file)


def model_command(config_file: Path) -> list[str]:
    """The command line that makes the model folder."""
    from rlrun.pod.role import roles

    return roles.config_command(f"{PACKAGE}.model", config_file)


def programs() -> Programs:
    """Programs of the stub image's containers."""
    from rlrun.pod.role.roles import Programs

    return Programs(role_command, model_command)
