"""The run's environments, each in a separate process for the duration of the run."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from loguru import logger

from rlrun.config.models.rollout import EnvironmentConfig
from rlrun.environments.process.containment import enclosure
from rlrun.environments.process.isolated import IsolatedEnvironment
from rlrun.environments.process.life import Command, Limits
from rlrun.environments.process.process_output import Log, for_another_container
from rlrun.environments.stage import Stage, TaskRef
from rlrun.orchestrator.aio.event_loop import Background
from rlrun.protocol.files.failures import RoleError
from rlrun.runtime import exit_codes
from rlrun.runtime.bootstrap import SHARED_SOCKET_VARIABLE, SOCKETS_VARIABLE, socket_of

MAX_HANG_SECONDS = 60.0
"""Timeout of a blocked event loop of an environment; the timeout of an episode is an upper bound."""


@dataclass(frozen=True)
class Arena:
    """A started environment: configuration, interface and train split."""

    config: EnvironmentConfig
    environment: Stage
    tasks: Sequence[TaskRef]
    digest: str = ""
    """Digest of the train split, with which the next attempt detects another data set; empty if unknown."""


def make_environment(config: EnvironmentConfig, logs: Path, host: Path | None = None) -> IsolatedEnvironment:
    """Create an environment from its configuration, not started.

    Args:
        config: configuration of the environment.
        logs: folder of the logs.
        host: socket of its container, if it has one.
    """
    limits = Limits(
        start_seconds=config.start_timeout_seconds,
        memory_bytes=int(config.memory_gib * 1024**3),
        hang_seconds=min(MAX_HANG_SECONDS, config.timeout_seconds),
    )
    name = re.sub(r"[^A-Za-z0-9._-]+", "_", config.label)
    command = Command(config.id, config.args, config.python, variables=tuple(config.variables))
    if host is not None and config.image is None:
        command = _with_variables(command, os.environ)
    names = [name, *(f"{name}-{number}" for number in range(2, config.workers + 1))]
    return IsolatedEnvironment(config.label, command, limits, [Log(logs / f"environment-{n}.log") for n in names], host)


def _with_variables(command: Command, env: Mapping[str, str]) -> Command:
    """Return the command with the variables for its process in the container shared by environments.

    The container itself has no such variables, so that an environment does not get the secrets of another one.
    """
    passed = command.passed(env)
    return replace(command, given=for_another_container(passed), withheld=frozenset(env.keys() - passed.keys()))


def host_of(environments: Sequence[EnvironmentConfig], index: int, env: Mapping[str, str]) -> Path | None:
    """Return the socket of the container of `environments[index]`, or None if it runs in a process of this container.

    Args:
        environments: environments of the run.
        index: index of the environment.
        env: environment variables of this process.
    """
    image, folder, shared = environments[index].image, env.get(SOCKETS_VARIABLE), env.get(SHARED_SOCKET_VARIABLE)
    if image is None:
        return Path(shared) if shared is not None and environments[index].shares_container else None
    if folder is not None:
        return Path(socket_of(folder, index))
    logger.warning(
        f"environments[{index}].image ({image}) is ignored outside of a pod; the environment runs in a local process"
    )
    return None


@asynccontextmanager
async def open_arenas(
    environments: Sequence[EnvironmentConfig], logs: Path, background: Background
) -> AsyncIterator[list[Arena]]:
    """Start all environments, keep them running, and stop them at the end of the block.

    Args:
        environments: configuration of the environments.
        logs: folder of their logs.
        background: function that starts endless coroutines.

    Raises:
        RoleError: an environment cannot be loaded or has no tasks.
    """
    stages = [
        make_environment(environment, logs, host_of(environments, index, os.environ))
        for index, environment in enumerate(environments)
    ]
    if reason := enclosure.explain_missing():
        logger.info(
            f"environments are not isolated from each other's processes and from this pod's credentials: {reason}"
        )
    try:
        for index, error in enumerate(await asyncio.gather(*(s.start() for s in stages), return_exceptions=True)):
            if isinstance(error, RoleError):
                raise RoleError(f"environments[{index}]: {error}", error.code) from error
            if error is not None:
                raise error
        for stage in stages:
            background(stage.run())
        yield arenas_of(environments, stages)
    finally:
        for stage in stages:
            stage.close()


def arenas_of(environments: Sequence[EnvironmentConfig], stages: Sequence[Stage]) -> list[Arena]:
    """Return the started environments with their train splits.

    Raises:
        RoleError: an environment has no training tasks.
    """
    arenas = [
        Arena(c, stage, stage.tasks("train"), stage.digest if isinstance(stage, IsolatedEnvironment) else "")
        for c, stage in zip(environments, stages, strict=True)
    ]
    for index, arena in enumerate(arenas):
        if not len(arena.tasks):
            raise RoleError(f"environments[{index}]: {arena.config.label} has no training tasks", exit_codes.DATA)
    return arenas
