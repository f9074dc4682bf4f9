"""The role's process: configuration, signals, exit code."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from functools import partial
from pathlib import Path

from loguru import logger

from rlrun.config.loader import load_file
from rlrun.config.problems import ConfigError
from rlrun.config.roles import OrchestratorConfig
from rlrun.config.rollout import EnvironmentConfig
from rlrun.inference.client import EngineClient
from rlrun.orchestrator.arenas import Arena, Background, open_arenas
from rlrun.orchestrator.background import background_tasks
from rlrun.orchestrator.discovery import Discovery, Resolve, resolve
from rlrun.orchestrator.engines import Engine, EnginePool, Replica
from rlrun.orchestrator.failures import first_cause
from rlrun.orchestrator.lease import lease_from_environment
from rlrun.orchestrator.monitor import REGULAR, Monitor, Pace
from rlrun.orchestrator.pipeline import Pipeline
from rlrun.orchestrator.progress import Progress, ProgressServer
from rlrun.orchestrator.shared import Connection
from rlrun.orchestrator.signals import Signal
from rlrun.orchestrator.stop import TERMINATED, Stop
from rlrun.orchestrator.tokens import ChatTokens, TemplateError
from rlrun.protocol import exit_codes
from rlrun.protocol.attempts import read_attempt
from rlrun.protocol.failures import RoleError, write_error
from rlrun.protocol.paths import RunPaths
from rlrun.protocol.shared import model_folder

OpenEnvironments = Callable[
    [Sequence[EnvironmentConfig], Path, Background], AbstractAsyncContextManager[Sequence[Arena]]
]


def load_chat(config: OrchestratorConfig) -> ChatTokens:
    """The policy's tokenizer.

    Raises:
        RoleError: there is none, or its chat template is of no use.
    """
    source = config.model.source(model_folder(Path(config.output_dir), config.shared_with))
    try:
        return ChatTokens.load(source, revision=config.model.revision, trust_remote_code=config.model.trust_remote_code)
    except (TemplateError, OSError, ValueError) as error:
        raise RoleError(f"model: the tokenizer of {source} cannot be used: {error}", exit_codes.DATA) from error


async def run(
    config: OrchestratorConfig,
    *,
    attempt: int,
    api_key: str,
    connect: Callable[[str], Engine] | None = None,
    look_up: Resolve = resolve,
    stop: Stop | None = None,
    open_environments: OpenEnvironments = open_arenas,
    pace: Pace = REGULAR,
) -> int:
    """Orchestrate one attempt to its end.

    Args:
        config: the role's resolved configuration.
        attempt: the attempt's number.
        api_key: the run's key, for trainer, engines and progress.
        connect: makes the client of an engine from its address; default: over HTTP.
        look_up: finds the addresses of `inference_service`.
        stop: how a signal ends the role.
        open_environments: starts the environments; default: each in a process of its own.
        pace: how often the engines are looked at.

    Returns:
        0 when every step is trained and saved; 143 when the run was stopped before.

    Raises:
        RoleError: why the run cannot go on; possibly inside an exception group.
    """
    began = time.monotonic()
    signals, pipeline = Signal(), None

    def over_http(url: str) -> Engine:
        longest = max(environment.timeout_seconds for environment in config.environments)
        update = config.weight_sync.timeout_seconds
        return EngineClient(url, api_key, generate_timeout=longest, update_timeout=update)

    connection = Connection(config, api_key, attempt=attempt)

    def look() -> Progress:
        if pipeline is not None:
            return pipeline.progress()
        waiting = f"{connection.waiting} since {time.monotonic() - began:.1f} s"
        return Progress(None, config.max_steps, None, None, None, None, {}, None, None, waiting, None, 0, 0)

    lease = lease_from_environment(attempt=attempt, look=look)
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(ProgressServer(config.host, config.metrics_port, api_key=api_key, look=look))
        background = await stack.enter_async_context(background_tasks())
        if lease is not None:
            background(lease.run())
        logs = RunPaths(Path(config.output_dir)).logs(attempt, "orchestrator")
        arenas = await stack.enter_async_context(open_environments(config.environments, logs, background))
        trainer = await stack.enter_async_context(connection)
        chat = await asyncio.to_thread(load_chat, config)
        pool = EnginePool([], signals, max_concurrency=config.max_concurrency)
        stack.push_async_callback(_close_clients, pool)
        if config.inference_service is None:
            for url in config.inference_urls:
                pool.add(Replica(url, (connect or over_http)(url)))
        else:
            background(Discovery(config.inference_service, pool, connect=connect or over_http, look_up=look_up).run())
        background(Monitor(pool, signals, pace).run())
        pipeline = Pipeline(
            config,
            read_attempt(RunPaths(Path(config.output_dir)).attempt_file(attempt)),
            arenas=arenas,
            chat=chat,
            pool=pool,
            trainer=trainer,
            signal=signals,
        )
        if stop is not None:
            stop.act = partial(_stop, pipeline, connection)
        if not await pipeline.run():
            logger.info("stopped by a signal")
            return TERMINATED
        if lease is not None:
            await lease.farewell()  # before the trainer ends: whoever sees that end knows of the last step
        await trainer.shutdown()
    return exit_codes.OK


def _stop(pipeline: Pipeline, connection: Connection) -> None:
    pipeline.stop()
    connection.leave()


async def _close_clients(pool: EnginePool) -> None:
    for replica in pool.replicas:
        await replica.client.close()


def configure_log() -> None:
    """Log to stderr, one line per message."""
    logger.remove()
    layout = "{time:HH:mm:ss} | {level: <7} | orchestrator | {message}"
    logger.add(sys.stderr, format=layout, level="INFO", backtrace=False, diagnose=False)


def read_config(file: Path) -> OrchestratorConfig:
    """The role's part of `run.json`.

    Raises:
        RoleError: the file is missing or wrong.
    """
    try:
        return load_file(OrchestratorConfig, file, section="orchestrator")
    except ConfigError as error:
        raise RoleError(" / ".join(str(error).splitlines()), exit_codes.CONFIGURATION) from None


def identity() -> tuple[int, str]:
    """Attempt and key from the environment.

    Raises:
        RoleError: one of them is missing.
    """
    attempt, api_key = os.environ.get("RLRUN_ATTEMPT", ""), os.environ.get("RLRUN_API_KEY", "")
    if not attempt.isdecimal() or int(attempt) < 1:
        raise RoleError(f"RLRUN_ATTEMPT is {attempt!r}; it has to be the attempt's number, from 1", exit_codes.USAGE)
    if not api_key:
        raise RoleError("RLRUN_API_KEY is not set; all roles of a run share one secret", exit_codes.USAGE)
    return int(attempt), api_key


async def _until_signalled(config: OrchestratorConfig, attempt: int, api_key: str) -> int:
    """Run until SIGTERM or SIGINT."""
    stop = Stop()
    if config.task == "SFT":
        from rlrun.orchestrator.sft import main as sft

        work = asyncio.ensure_future(sft.run(config, attempt=attempt, api_key=api_key, stop=stop))
    else:
        work = asyncio.ensure_future(run(config, attempt=attempt, api_key=api_key, stop=stop))
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, lambda: stop.act() if stop.first() and stop.act else work.cancel())
    try:
        return await work
    except asyncio.CancelledError:
        logger.info("stopped by a signal")
        return TERMINATED


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line and run; returns the exit code."""
    configure_log()
    parser = argparse.ArgumentParser(prog="python -m rlrun.orchestrator", description="Orchestrate one run.")
    parser.add_argument(
        "--config", type=Path, required=True, help="run.json, or a file of the orchestrator's own fields"
    )
    arguments = parser.parse_args(argv)
    folder: Path | None = None
    try:
        config = read_config(arguments.config)
        attempt, api_key = identity()
        folder = RunPaths(Path(config.output_dir)).logs(attempt, "orchestrator")
        return asyncio.run(_until_signalled(config, attempt, api_key))
    except Exception as failure:
        cause = first_cause(failure)
        code = cause.code if isinstance(cause, RoleError) else exit_codes.FAILURE
        message = str(cause) if isinstance(cause, RoleError) else f"{type(cause).__name__}: {cause}"
        if isinstance(cause, RoleError):
            logger.error(message)
        else:
            logger.opt(exception=failure).error(f"this is a bug in the orchestrator: {message}")
        if folder is not None:
            write_error(folder, "orchestrator", RoleError(message, code))
        return code
