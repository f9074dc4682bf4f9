"""One vLLM server in this process: vLLM's app, RLRun's routes in it, and the guard around it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import threading
import time
from argparse import Namespace
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from loguru import logger
from pydantic import ValidationError

from rlrun.diagnostics import heap
from rlrun.inference.engine_processes import fork_the_engine, may_fork, tie_children_to_this_process
from rlrun.inference.engine_settings import (
    InferenceSettings,
    default_vllm_environment,
    vllm_arguments,
    vllm_environment,
)
from rlrun.inference.heartbeat import Heartbeat
from rlrun.inference.weights.handover import Handover, HandoverOptions
from rlrun.inference.weights.lora_adapters import AdapterHandover, AdapterServer
from rlrun.inference.weights.preflight import FolderError, Shapes, check_model
from rlrun.inference.weights.receive import Receiver, Staging
from rlrun.inference.weights.sleeping import DROP_WEIGHTS, KEEP_WEIGHTS, Sleeper, SleepGate
from rlrun.protocol.files.failures import RoleError, write_error
from rlrun.runtime import exit_codes

if TYPE_CHECKING:
    from fastapi import FastAPI
    from vllm.engine.protocol import EngineClient


TERMINATED = 128 + signal.SIGTERM
WARM_UP_TOKENS = 4
ANSWER_SECONDS = 1.0


def serve_engine(settings: InferenceSettings) -> int:
    """Serve until SIGTERM or SIGINT and return the exit code.

    Exit codes: 0 after a signal, 69 if the address is in use, 65 for an invalid model folder, 78 for an invalid setting (these three with
    one message, and before the engine starts if possible), 143 if stopped during the start, 1 if the engine died or lost its weights. The
    process becomes the leader of its own process group (see `engine_processes`).
    """
    try:
        expected = check_model(settings)
    except FolderError as error:
        return _print_refusal(exit_codes.DATA, str(error))
    try:
        listener = _bind_socket(settings.host, settings.port)
    except OSError as error:
        hint = "stop the process that uses the port, or choose another port"
        message = f"inference: cannot listen on {settings.host}:{settings.port}: {error.strerror}; {hint}"
        return _print_refusal(exit_codes.UNAVAILABLE, message)
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, _stop_the_start)
    tie_children_to_this_process()
    os.environ.update(default_vllm_environment(settings, os.environ) | vllm_environment(settings))
    with listener:
        return _run_server(settings, listener, expected)


def _stop_the_start(*_: object) -> None:
    """Signal handler before the HTTP server is up: exit at once; the children follow (see `engine_processes`).

    Raising an exception does not work because vLLM's start swallows it. The default action of the signal does not work because it never
    reaches the first process of a container.
    """
    os._exit(TERMINATED)


def _print_refusal(code: int, message: str) -> int:
    print(message, file=sys.stderr, flush=True)
    write_error(None, "inference", RoleError(message.removeprefix("inference: "), code))
    return code


def _bind_socket(host: str, port: int) -> socket.socket:
    """Return a listening socket. It is bound before the engine starts, so that no other process gets the port."""
    family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, proto)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        # Binding succeeds next to another socket that was bound with SO_REUSEADDR; listening fails.
        listener.listen(2048)
    except OSError:
        listener.close()
        raise
    return listener


def _run_server(settings: InferenceSettings, listener: socket.socket, expected: Shapes | None) -> int:
    """Parse vLLM's arguments, start the engine and serve. Imports vLLM, which must happen after the environment is set."""
    with heap.without_collector():
        import uvloop
        from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
        from vllm.logger import configure_logging_from_args
        from vllm.utils.argparse_utils import FlexibleArgumentParser
        from vllm.utils.system_utils import set_ulimit

    try:
        args = make_arg_parser(FlexibleArgumentParser()).parse_args(vllm_arguments(settings))
        configure_logging_from_args(args)
        validate_parsed_serve_args(args)
    except SystemExit:  # argparse has printed the invalid argument to stderr
        return _print_refusal(
            exit_codes.CONFIGURATION, "inference: vLLM refuses an argument; correct or remove it in extraArgs"
        )
    except (ValueError, TypeError, KeyError) as error:
        return _print_refusal(exit_codes.CONFIGURATION, f"inference: {error}")
    set_ulimit()
    if may_fork(settings):
        fork_the_engine(listener)
    code: int = uvloop.run(_serve_until_stopped(args, settings, listener, expected))
    return code


async def _serve_until_stopped(
    args: Namespace, settings: InferenceSettings, listener: socket.socket, expected: Shapes | None
) -> int:
    """Start the engine, serve until stopped, and return the exit code."""
    with heap.without_collector():
        from vllm.entrypoints.launchers.api_server.app_state import init_app_state
        from vllm.entrypoints.launchers.api_server.entry import build_async_engine_client
        from vllm.entrypoints.launchers.app import build_app
        from vllm.entrypoints.launchers.launcher import serve_http

    from rlrun.inference.guard import Guard
    from rlrun.inference.http.generate import generate_router
    from rlrun.inference.http.routes import Control, router
    from rlrun.inference.http.vllm_tokens import VLLMTokens

    async with contextlib.AsyncExitStack() as stack:
        try:
            engine = await stack.enter_async_context(build_async_engine_client(args))
        except (
            ValueError
        ) as error:  # a setting contradicts the model's config; failures of the engine raise other errors
            return _print_refusal(exit_codes.CONFIGURATION, f"inference: {_problem_sentence(error)}")
        asked_to_stop = _shutdown_event(engine)
        tasks = await engine.get_supported_tasks()
        app = build_app(args, tasks, engine.model_config)
        await init_app_state(engine, app.state, args, tasks)
        app.include_router(router)
        adapters = app.state.openai_serving_models.lora_requests
        tokens = VLLMTokens(engine, served_model=settings.served_model_name, adapters=adapters)
        app.include_router(generate_router(tokens))
        handover = _make_hand_over(engine, app, settings, expected)
        heartbeat = Heartbeat(
            lambda: engine.collective_rpc("check_health"),
            interval=settings.heartbeat_interval,
            timeout=settings.heartbeat_timeout,
        )
        app.state.rlrun = Control(handover, heartbeat)
        # The guard wraps the finished stack, because vLLM builds it inside build_app: no middleware may run before the guard.
        inner = SleepGate(app.middleware_stack or app.build_middleware_stack(), lambda: handover.asleep)
        app.middleware_stack = Guard(inner, settings.api_key)
        await _warm_up(engine)
        if settings.colocated:  # before the port answers: the trainer waits for this and then loads its model
            await handover.sleep()
        async with _beat_while_running(heartbeat):
            stopped = await serve_http(app, sock=listener, **_http_options(args, settings))
        died = not asked_to_stop.is_set() or handover.fault is not None
        handover.close()
    # serve_http returns the rest of the shutdown, which must be awaited after the engine has ended.
    await stopped
    return exit_codes.FAILURE if died else exit_codes.OK


def _http_options(args: Namespace, settings: InferenceSettings) -> dict[str, object]:
    """Return the options of vLLM's HTTP server."""
    from vllm import envs

    from rlrun.inference.http.connections import Connection

    return {
        "host": settings.host,
        "port": settings.port,
        "http": Connection,
        "log_level": args.uvicorn_log_level,
        "access_log": False,
        "timeout_keep_alive": envs.VLLM_HTTP_TIMEOUT_KEEP_ALIVE,
        "h11_max_incomplete_event_size": args.h11_max_incomplete_event_size,
        "h11_max_header_count": args.h11_max_header_count,
    }


def _make_hand_over(
    engine: EngineClient, app: FastAPI, settings: InferenceSettings, expected: Shapes | None
) -> Handover:
    """Return the hand-over of whole weights, or of adapters if the engine serves adapters."""
    options = HandoverOptions(
        base_model=settings.model_path,
        weights_dir=settings.weights_dir,
        expected=expected,
        timeout=settings.update_timeout,
        on_broken=_stop_soon,
    )
    staging = Staging()
    receiver = rebuilder = sleeper = None
    if settings.receives:
        from rlrun.inference.weights.incoming import Fetching

        receiver = Receiver(
            api_key=settings.api_key,
            expected=expected,
            make_fetch=Fetching,
            staging=staging,
            keeps=settings.deltas,
        )
    if settings.deltas and settings.max_lora_rank is None:
        from rlrun.inference.weights.delta_folders import (
            Rebuilder,
        )  # with numpy, which other engines' servers do not need

        rebuilder = Rebuilder(expected=expected, staging=staging)
    if settings.colocated:
        level = DROP_WEIGHTS if settings.max_lora_rank is None else KEEP_WEIGHTS
        sleeper = Sleeper(engine, level=level)
    if settings.max_lora_rank is None:
        return Handover(engine, options, receiver=receiver, sleeper=sleeper, rebuilder=rebuilder)
    from vllm.lora.request import LoRARequest

    def in_use() -> set[str]:
        return {state.lora_name for state in engine.output_processor.request_states.values() if state.lora_name}

    return AdapterHandover(
        engine,
        AdapterServer(
            served_name=settings.served_model_name,
            registry=app.state.openai_serving_models.lora_requests,
            in_use=in_use,
            make_request=LoRARequest,
            max_rank=settings.max_lora_rank,
            runs=settings.lora_runs,
        ),
        options,
        sleeper=sleeper,
    )


def _shutdown_event(engine: EngineClient) -> threading.Event:
    """Return an event that is set if vLLM's signal handler shuts the engine down. An engine that died looks the same afterwards."""
    asked, shutdown = threading.Event(), engine.shutdown

    def record(timeout: float | None = None) -> None:
        asked.set()
        shutdown(timeout=timeout)

    engine.shutdown = record
    return asked


def _problem_sentence(error: ValueError) -> str:
    """Return the error without pydantic's frame."""
    if isinstance(error, ValidationError):
        return "; ".join(str(entry["msg"]) for entry in error.errors(include_url=False, include_input=False))
    return str(error)


def _stop_soon() -> None:
    """End this server like a signal from outside, after the response with the reason was sent."""
    asyncio.get_running_loop().call_later(ANSWER_SECONDS, os.kill, os.getpid(), signal.SIGTERM)


@contextlib.asynccontextmanager
async def _beat_while_running(heartbeat: Heartbeat) -> AsyncIterator[None]:
    await heartbeat.check_workers()
    task = asyncio.create_task(heartbeat.run())
    try:
        yield
    finally:
        task.cancel()


async def _warm_up(engine: EngineClient) -> None:
    """Send one request through all parts of sampling, so that the first rollout does not wait for lazy compilation."""
    from vllm import SamplingParams
    from vllm.inputs.engine import tokens_input

    started = time.monotonic()
    sampling = SamplingParams(
        n=2, max_tokens=WARM_UP_TOKENS, temperature=0.7, top_p=0.9, logprobs=0, seed=0, ignore_eos=True
    )
    prompt = tokens_input([0] * WARM_UP_TOKENS, cache_salt="rlrun-warm-up")
    async for _ in engine.generate(prompt, sampling, "rlrun-warm-up"):
        pass
    logger.info("the engine completed its first request after {:.1f} s", time.monotonic() - started)
