"""Process of the orchestrator role: configuration, signals and exit code."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from loguru import logger

from rlrun.config.loading.loader import load_file
from rlrun.config.loading.problems import ConfigError
from rlrun.config.models.roles import TRAINING_TASKS, OrchestratorConfig
from rlrun.config.models.rollout import EnvironmentConfig, Sampling
from rlrun.diagnostics import heap, stacks
from rlrun.hub.fetch import model_source
from rlrun.orchestrator.aio.event_loop import Background, raise_limit
from rlrun.orchestrator.aio.volume_access import in_thread
from rlrun.orchestrator.attempt import TERMINATED, Stop, feed_trainer, first_cause, open_training
from rlrun.orchestrator.engines.discovery import REGULAR, Monitor, Pace, Resolve, open_engines, resolve_addresses
from rlrun.orchestrator.engines.draining import EngineRequests
from rlrun.orchestrator.engines.replica import Engine
from rlrun.orchestrator.rl_pipeline import Pipeline
from rlrun.orchestrator.rollouts.chat_template import TemplateError
from rlrun.orchestrator.rollouts.chat_tokens import ChatTokens, preload_modules
from rlrun.orchestrator.rollouts.context import RunContext
from rlrun.orchestrator.rollouts.environment_pool import Arena, open_arenas
from rlrun.orchestrator.rollouts.playable_tasks import check_turns, load_tokens
from rlrun.orchestrator.trainer.shared_trainer import Connection
from rlrun.protocol.files.failures import RoleError, exit_code_of, write_error
from rlrun.protocol.files.identity import claim_identity, complete_role_file
from rlrun.protocol.files.paths import RunPaths
from rlrun.protocol.files.shared_trainer_files import model_folder
from rlrun.runtime import exit_codes, process_logs
from rlrun.runtime.processes import refuse_inspection

OpenEnvironments = Callable[
    [Sequence[EnvironmentConfig], Path, Background], AbstractAsyncContextManager[Sequence[Arena]]
]


@dataclass(frozen=True)
class Outside:
    """External dependencies of an attempt, replaceable in tests."""

    connect: Callable[[str], Engine] | None = None
    """Create the client of an engine from its address. Default: a client over HTTP."""
    look_up: Resolve = resolve_addresses
    """Resolve the addresses of `inference_service`."""
    open_environments: OpenEnvironments = open_arenas
    """Start the environments. Default: each in a separate process."""
    pace: Pace = REGULAR
    """Intervals between health checks of the engines."""
    engine_requests: EngineRequests | None = None
    """Requests of the operator. Default: the requests in the answers to the Lease's renewals."""


REAL = Outside()


def load_chat(config: OrchestratorConfig) -> ChatTokens:
    """Load the policy's tokenizer.

    Raises:
        RoleError: the model has no tokenizer, its chat template is unusable, or the template does not take a
            configured argument.
    """
    made = model_folder(Path(config.output_dir), config.shared_with)
    source = model_source(config.model, made, with_weights=False, trained=config.task in TRAINING_TASKS)
    chat = load_tokens(source, revision=config.model.revision, trust_remote_code=config.model.trust_remote_code)
    samplings: list[tuple[str, Sampling | None]] = [
        *((f"environments[{i}].sampling", e.sampling or config.sampling) for i, e in enumerate(config.environments)),
        ("evaluation.sampling", config.evaluation.sampling if config.evaluation is not None else None),
    ]
    for place, sampling in samplings:
        try:
            chat.called_with(sampling.chat_template_arguments if sampling is not None else {})
        except TemplateError as error:
            raise RoleError(f"{place}.chatTemplateArguments: {error}", exit_codes.CONFIGURATION) from error
    return chat


def play_turns(config: OrchestratorConfig, arenas: Sequence[Arena], chat: ChatTokens) -> None:
    """Render a two-turn conversation and a tool turn with the template of each multi-turn environment.

    Raises:
        RoleError: the template cannot continue a conversation.
    """
    for number, arena in enumerate(arenas):
        if arena.environment.single_turn:
            continue
        template = chat.called_with((arena.config.sampling or config.sampling).chat_template_arguments).template
        if (warning := check_turns(f"environments[{number}] ({arena.config.label})", template)) is not None:
            logger.warning(warning)


async def orchestrate_attempt(
    config: OrchestratorConfig,
    *,
    attempt: int,
    api_key: str,
    stop: Stop | None = None,
    loaded: Callable[[], None] = lambda: None,
    outside: Outside = REAL,
) -> int:
    """Orchestrate one attempt to its end.

    Args:
        config: resolved configuration of the role.
        attempt: number of the attempt.
        api_key: the run's key for trainer, engines and progress; a guest's trainer and engines confirm it.
        stop: reaction of the role to signals.
        loaded: callback after loading, before the first rollout.
        outside: engines and environments.

    Returns:
        0 if every step is trained and saved; 143 if the run was stopped earlier.

    Raises:
        RoleError: the run cannot continue; possibly inside an exception group.
    """
    connection = Connection(config, api_key, attempt=attempt)
    # Parts close in the reverse order: rollouts end before the trainer's connection, and the last Lease renewal comes last.
    async with AsyncExitStack() as stack:
        running = await stack.enter_async_context(open_training(connection, config, attempt, api_key, stop))
        background, signals = running.background, running.signal
        # Imports take seconds. They run while the environments start and the trainer loads its
        # model.
        preloaded = asyncio.ensure_future(asyncio.to_thread(preload_modules))
        environments = outside.open_environments(config.environments, running.logs, background)
        arenas = await stack.enter_async_context(environments)
        trainer = await stack.enter_async_context(connection)  # a guest receives its key for the engines here
        await preloaded
        chat = await in_thread(partial(load_chat, config))
        play_turns(config, arenas, chat)
        key, connect, look_up = connection.api_key, outside.connect, outside.look_up
        engines = open_engines(
            config, key, signals, background, connect=connect, look_up=look_up, token_limit=chat.token_limit
        )
        pool = await stack.enter_async_context(engines)
        background(Monitor(pool, signals, outside.pace).run())
        begun = await running.read_file()
        context = RunContext(
            config,
            begun,
            arenas=arenas,
            chat=chat,
            pool=pool,
            trainer=trainer,
            signal=signals,
            volume=running.volume,
            engine_requests=outside.engine_requests or running.engine_requests,
        )
        pipeline = await in_thread(partial(Pipeline, context))
        return await feed_trainer(running, pipeline, connection, trainer, loaded=loaded)


def configure_log() -> None:
    """Log to stderr, one line per message."""
    process_logs.configure_log(sys.stderr, "{time:HH:mm:ss} | {level: <7} | orchestrator | {message}")


def read_config(file: Path) -> OrchestratorConfig:
    """Read the role's part of `run.json`.

    Raises:
        RoleError: the file is missing or invalid.
    """
    try:
        return claim_identity(load_file(OrchestratorConfig, file, section="orchestrator", complete=complete_role_file))
    except ConfigError as error:
        raise RoleError(" / ".join(str(error).splitlines()), exit_codes.CONFIGURATION) from None


def read_identity() -> tuple[int, str]:
    """Read the attempt's number and the run's key from the environment.

    Raises:
        RoleError: one of the variables is missing or invalid.
    """
    attempt, api_key = os.environ.get("RLRUN_ATTEMPT", ""), os.environ.get("RLRUN_API_KEY", "")
    if not attempt.isdecimal() or int(attempt) < 1:
        raise RoleError(f"RLRUN_ATTEMPT is {attempt!r}; set it to the attempt's number, 1 or more", exit_codes.USAGE)
    if not api_key:
        raise RoleError(
            "RLRUN_API_KEY is not set; set it to the secret that all roles of the run share", exit_codes.USAGE
        )
    return int(attempt), api_key


class Begin(Protocol):
    """Function that starts an attempt and returns its exit code."""

    def __call__(
        self, config: OrchestratorConfig, *, attempt: int, api_key: str, stop: Stop
    ) -> Coroutine[None, None, int]: ...


def _begin_attempt(config: OrchestratorConfig, *, attempt: int, api_key: str, stop: Stop) -> Coroutine[None, None, int]:
    if config.task == "SFT":
        from rlrun.orchestrator.sft import sft_attempt as sft

        return sft.feed_attempt(config, attempt=attempt, api_key=api_key, stop=stop)
    return orchestrate_attempt(config, attempt=attempt, api_key=api_key, stop=stop, loaded=heap.Slices().begin)


async def _until_signalled(config: OrchestratorConfig, attempt: int, api_key: str, begin: Begin) -> int:
    stop = Stop()
    work = asyncio.ensure_future(begin(config, attempt=attempt, api_key=api_key, stop=stop))
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, lambda: stop.act() if stop.first() and stop.act else work.cancel())
    try:
        return await work
    except asyncio.CancelledError:
        logger.info("stopped by a signal")
        return TERMINATED


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line, run the role and return the exit code."""
    return run_process(argv, "rlrun.orchestrator", _begin_attempt)


def run_process(argv: Sequence[str] | None, module: str, begin: Begin) -> int:
    """Run the role's process from its command line to its exit code.

    Args:
        argv: command line. Default: the command line of this process.
        module: module name shown in the usage text.
        begin: function that runs the attempt.
    """
    configure_log()
    stacks.answer_requests()
    refuse_inspection()  # after `listen`, see `stacks.is_listening`
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description="Orchestrate one run.")
    parser.add_argument(
        "--config", type=Path, required=True, help="run.json, or a file of the orchestrator's own fields"
    )
    arguments = parser.parse_args(argv)
    folder: Path | None = None
    try:
        config = read_config(arguments.config)
        attempt, api_key = read_identity()
        raise_limit(config)  # before the first connection or pipe is opened
        folder = RunPaths(Path(config.output_dir)).logs(attempt, "orchestrator")
        return asyncio.run(_until_signalled(config, attempt, api_key, begin))
    except Exception as failure:
        cause = first_cause(failure)
        code = exit_code_of(cause)
        message = str(cause) if isinstance(cause, RoleError) else f"{type(cause).__name__}: {cause}"
        if isinstance(cause, RoleError) or code == exit_codes.STORAGE:
            logger.error(message)
        else:
            logger.opt(exception=failure).error(f"this is a bug in the orchestrator: {message}")
        if folder is not None:
            write_error(folder, "orchestrator", RoleError(message, code))
        return code
