"""The stub trainer: its own run in the main thread, and those of guests beside it."""

from __future__ import annotations

import os
import time
from pathlib import Path

from loguru import logger

from rlrun.config.roles import TrainerConfig
from rlrun.config.run import fingerprint
from rlrun.protocol import exit_codes
from rlrun.protocol.failures import RoleError, write_error
from rlrun.protocol.paths import RunPaths
from rlrun.stub.group import Leader, follow, master, place
from rlrun.stub.guests import GuestRuns
from rlrun.stub.model import ensure_model
from rlrun.stub.run import Run
from rlrun.stub.script import Script, happen, load_script
from rlrun.trainer import resume
from rlrun.trainer.channel import Channel


def _lead(config: TrainerConfig, number: int, api_key: str, script: Script, group: Leader) -> None:
    """Pod 0's part."""
    paths, faults = RunPaths(Path(config.output_dir)), script.trainer.faults
    channel = Channel.listen(
        attempt=number,
        api_key=api_key,
        host=config.host,
        port=config.port,
        batch_path=lambda step: paths.batch(step, number),
    )
    attempt = resume.begin(
        paths,
        config,
        attempt=number,
        world_size=config.world_size,
        config_hash=fingerprint(config),
        with_orchestrator=True,
        log=logger.warning,
    )
    start = f"the checkpoint of step {attempt.base_step}" if attempt.base_step else "the model"
    logger.info(f"attempt {number}: {config.world_size} ranks without torch, from {start}")
    happen(faults, attempt=number, step=0, pod=0)
    time.sleep(script.trainer.start_seconds)

    def before_step(step: int) -> None:
        group.together(step)
        happen(faults, attempt=number, step=step, pod=0)

    model = ensure_model(config, script.policy)
    own = Run(config, attempt, channel, model=model, script=script, before_step=before_step)
    guests = GuestRuns(config, channel, model=model, script=script)
    own.run()
    guests.wait()
    group.finish()
    channel.close()


def run(config: TrainerConfig, *, attempt: int, api_key: str) -> int:
    """One pod's part of an attempt.

    Args:
        config: the role's resolved configuration.
        attempt: this attempt's number, new in the run's folder.
        api_key: guards the channel to the orchestrator.

    Returns:
        The exit code 0.

    Raises:
        RoleError: what went wrong, for a person, with the exit code.
    """
    folder = Path(config.output_dir)
    script, (pod, pods) = load_script(folder), place()

    def lost(message: str) -> None:
        """The group dies as a whole, wherever the main thread is."""
        logger.error(message)
        write_error(RunPaths(folder).logs(attempt, "trainer"), "trainer", RoleError(message))
        os._exit(exit_codes.FAILURE)

    if pod:

        def take_part(step: int) -> None:
            happen(script.trainer.faults, attempt=attempt, step=step, pod=pod)

        follow(attempt, pod, *master(), take_part)
        return exit_codes.OK
    port = master()[1] if pods > 1 else 0
    group = Leader(attempt, pods, port, lost)
    _lead(config, attempt, api_key, script, group)
    return exit_codes.OK
