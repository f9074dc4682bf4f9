"""The stub trainer: its own run in the main thread, and guests in other threads."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from loguru import logger

from rlrun.config.models.roles import TrainerConfig
from rlrun.config.models.run_config import config_fingerprint
from rlrun.protocol.files.failures import RoleError, write_error
from rlrun.protocol.files.paths import RunPaths
from rlrun.protocol.files.volume_faults import Volume
from rlrun.runtime import exit_codes
from rlrun.trainer.channel.run_channel import Channel
from rlrun.trainer.checkpoints import resume
from rlrun.trainer.engines_beside import EnginesBeside
from rlrun.trainer.ranks.stop import Stop
from tests.support.stub.group import Leader, follow, master, read_place
from tests.support.stub.guests import GuestRuns
from tests.support.stub.model import ensure_model
from tests.support.stub.run import Run
from tests.support.stub.script import Script, apply_faults, load_script


def _lead(config: TrainerConfig, number: int, api_key: str, script: Script, group: Leader, stop: Stop) -> int:
    """Run pod 0's part; return the exit code."""
    paths, faults = RunPaths(Path(config.output_dir)), script.trainer.faults
    engines = EnginesBeside(config.engine_urls, api_key) if config.colocated else None
    if engines is not None:
        engines.wait_until_asleep()
    channel = Channel.start_server(
        attempt=number,
        api_key=api_key,
        host=config.host,
        port=config.port,
        batch_path=lambda step: paths.batch(step, number),
    )
    beginning = resume.Beginning()
    new = resume.NewAttempt(number, config.world_size, config_fingerprint(config), with_orchestrator=True)
    attempt = Volume(paths.root, say=logger.warning).insist(
        "begin the attempt",
        lambda: resume.start_attempt(paths, config, new, log=logger.warning, beginning=beginning),
    )
    start = f"the checkpoint of step {attempt.base_step}" if attempt.base_step else "the model"
    logger.info(f"attempt {number}: {config.world_size} ranks without torch, from {start}")
    apply_faults(faults, attempt=number, step=0, pod=0, stop=stop)
    time.sleep(script.trainer.start_seconds)

    def before_step(step: int) -> None:
        group.together(step)
        apply_faults(faults, attempt=number, step=step, pod=0, stop=stop)

    model = ensure_model(config, script.policy)
    own = Run(config, attempt, channel, model=model, script=script, before_step=before_step, engines=engines)
    guests = GuestRuns(config, channel, model=model, script=script, api_key=api_key)
    stop.allow_time(config.checkpoint.grace_period_seconds)
    stop.call_after_request(own.leaving.set)
    channel.stop = stop.request_stop
    own.run()
    if stop.is_requested:  # guests lose unsaved steps: tests of a shared trainer's end use the real trainer
        own.save_last()
    else:
        guests.wait()
    group.finish(stopped=stop.is_requested)
    channel.close()
    return stop.exit_code if stop.is_requested else exit_codes.OK


def run(config: TrainerConfig, *, attempt: int, api_key: str, stop: Stop) -> int:
    """Run one pod's part of an attempt.

    Args:
        config: the role's resolved configuration.
        attempt: this attempt's number, new in the run's folder.
        api_key: key of the channel to the orchestrator.
        stop: stop request of a signal.

    Returns:
        The exit code: 0, or 128 + n if signal n ended the run early.

    Raises:
        RoleError: a failure with a message for users and the exit code.
    """
    folder = Path(config.output_dir)
    script, (pod, pods) = load_script(folder), read_place()

    def lost(message: str) -> None:
        """End the whole group, regardless of the main thread's state."""
        logger.error(message)
        write_error(RunPaths(folder).logs(attempt, "trainer"), "trainer", RoleError(message))
        os._exit(exit_codes.FAILURE)

    if pod:

        def take_part(step: int) -> None:
            apply_faults(script.trainer.faults, attempt=attempt, step=step, pod=pod, stop=stop)

        finished = follow(attempt, pod, *master(), take_part, stop, config.checkpoint.grace_period_seconds)
        return exit_codes.OK if finished else stop.exit_code
    port = master()[1] if pods > 1 else 0
    group = Leader(attempt, pods, port, lost, lambda: stop.request_stop(signal.SIGTERM))
    return _lead(config, attempt, api_key, script, group, stop)
