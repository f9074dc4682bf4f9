"""One vLLM server in this process: vLLM's own app, our router on it, the guard around it."""

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
from typing import TYPE_CHECKING, Any

from loguru import logger
from pydantic import ValidationError

from rlrun.diagnostics import heap
from rlrun.inference.command import vllm_arguments, vllm_environment
from rlrun.inference.fork import fork_the_engine, may_fork
from rlrun.inference.heartbeat import Heartbeat
from rlrun.inference.lifeline import tie_children_to_this_process
from rlrun.inference.settings import InferenceSettings
from rlrun.inference.weights.handover import Handover
from rlrun.inference.weights.lora_adapters import AdapterHandover, AdapterServer
from rlrun.inference.weights.preflight import FolderError, Shapes, check_model
from rlrun.inference.weights.receive import Receiver
from rlrun.inference.weights.sleeping import DROP_WEIGHTS, KEEP_WEIGHTS, Sleeper, SleepGate
from rlrun.inference.weights.staging import Staging
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

    0 after a signal, 69 when the address is taken, 65 when the model folder and 78 when a setting cannot work (all of these with one
    message and before the engine starts where it can be known), 143 when stopped during the start, 1 when the engine
    died or lost its weights. The process becomes the leader of its own process group (see `lifeline`).
    """
    try:
        expected = check_model(settings)
    except FolderError as error:
        return _print_refusal(exit_codes.DATA, str(error))
    try:
        listener = _bind_socket(settings.host, settings.port)
    except OSError as error:
        hint = "stop what listens there or choose another port"
        message = f"inference: cannot listen on {settings.host}:{settings.port}: {error.strerror}; {hint}"
        return _print_refusal(exit_codes.UNAVAILABLE, message)
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, _stop_the_start)
    tie_children_to_this_process()
    os.environ.update(vllm_environment(settings))
    with listener:
        return _run_server(settings, listener, expected)


def _stop_the_start(*_: object) -> None:
    """Signal handler until the HTTP server takes over: leave at once, the children follow (see `lifeline`).

    An exception would not do: vLLM's start swallows it. Neither would the signal's default: it never reaches the first
    process of a container.
    """
    os._exit(TERMINATED)


def _print_refusal(code: int, message: str) -> int:
    print(message, file=sys.stderr, flush=True)
    write_error(None, "inference", RoleError(message.removeprefix("inference: "), code))
    return code


def _bind_socket(host: str, port: int) -> socket.socket:
    """A bound socket, taken before the engine starts so that no other process gets the port meanwhile."""
    family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, proto)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        # Binding alone does not fail beside another socket that was bound with SO_REUSEADDR; listening does.
        listener.listen(2048)
    except OSError:
        listener.close()
        raise
    return listener


def _run_server(settings: InferenceSettings, listener: socket.socket, expected: Shapes | None) -> int:
    """Parse, start the engine, serve. Imports vLLM, hence not before the environment is set."""
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
    except SystemExit:  # argparse said on stderr which argument it does not take
        return _print_refusal(exit_codes.CONFIGURATION, "inference: vLLM does not take these arguments; see extraArgs")
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
    """Start the engine and serve until stopped; returns the exit code."""
    with heap.without_collector():
        from vllm import envs
        from vllm.entrypoints.launchers.api_server.app_state import init_app_state
        from vllm.entrypoints.launchers.api_server.entry import build_async_engine_client
        from vllm.entrypoints.launchers.app import build_app
        from vllm.entrypoints.launchers.launcher import serve_http

    from rlrun.inference.guard import Guard
    from rlrun.inference.http.connections import Connection
    from rlrun.inference.http.generate import generate_router
    from rlrun.inference.http.routes import Control, router
    from rlrun.inference.http.vllm_tokens import VLLMTokens

    async with contextlib.AsyncExitStack() as stack:
        try:
            engine = await stack.enter_async_context(build_async_engine_client(args))
        except ValueError as error:  # the model's config does not go with a setting; the engine's own faults are others
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
        # Around the finished stack, because vLLM builds it inside build_app: nothing runs before the guard.
        inner = SleepGate(app.middleware_stack or app.build_middleware_stack(), lambda: handover.asleep)
        app.middleware_stack = Guard(inner, settings.api_key)
        await _warm_up(engine)
        if settings.colocated:  # before it answers anybody: the trainer waits for this to load its model
            await handover.sleep()
        async with _beat_while_running(heartbeat):
            stopped = await serve_http(
                app,
                sock=listener,
                host=settings.host,
                port=settings.port,
                http=Connection,
                log_level=args.uvicorn_log_level,
                access_log=False,
                timeout_keep_alive=envs.VLLM_HTTP_TIMEOUT_KEEP_ALIVE,
                h11_max_incomplete_event_size=args.h11_max_incomplete_event_size,
                h11_max_header_count=args.h11_max_header_count,
            )
        died = not asked_to_stop.is_set() or handover.fault is not None
        handover.close()
    # vLLM hands back the rest of the shutdown, to be awaited once the engine is gone.
    await stopped
    return exit_codes.FAILURE if died else exit_codes.OK


def _make_hand_over(
    engine: EngineClient, app: FastAPI, settings: InferenceSettings, expected: Shapes | None
) -> Handover:
    """Hand-over of whole weights, or of adapters where the engine was started for them."""
    common: dict[str, Any] = {
        "base_model": settings.model_path,
        "weights_dir": settings.weights_dir,
        "expected": expected,
        "timeout": settings.update_timeout,
        "on_broken": _stop_soon,
    }
    staging = Staging()
    if settings.receives:
        from rlrun.inference.weights.incoming import Fetching

        common["receiver"] = Receiver(
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

        common["rebuilder"] = Rebuilder(expected=expected, staging=staging)
    if settings.colocated:
        level = DROP_WEIGHTS if settings.max_lora_rank is None else KEEP_WEIGHTS
        common["sleeper"] = Sleeper(engine, level=level)
    if settings.max_lora_rank is None:
        return Handover(engine, **common)
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
        **common,
    )


def _shutdown_event(engine: EngineClient) -> threading.Event:
    """Set when vLLM's signal handler shuts the engine down; an engine that died looks the same afterwards."""
    asked, shutdown = threading.Event(), engine.shutdown

    def record(timeout: float | None = None) -> None:
        asked.set()
        shutdown(timeout=timeout)

    engine.shutdown = record
    return asked


def _problem_sentence(error: ValueError) -> str:
    """The sentence that says what is wrong, without pydantic's frame around it."""
    if isinstance(error, ValidationError):
        return "; ".join(str(entry["msg"]) for entry in error.errors(include_url=False, include_input=False))
    return str(error)


def _stop_soon() -> None:
    """End this server like a signal from outside, once the answer that says why has left."""
    asyncio.get_running_loop().call_later(ANSWER_SECONDS, os.kill, os.getpid(), signal.SIGTERM)


@contextlib.asynccontextmanager
async def _beat_while_running(heartbeat: Heartbeat) -> AsyncIterator[None]:
    await heartbeat.beat()
    task = asyncio.create_task(heartbeat.run())
    try:
        yield
    finally:
        task.cancel()


async def _warm_up(engine: EngineClient) -> None:
    """One request through every part of sampling, so that no rollout pays for what is compiled at first use."""
    from vllm import SamplingParams
    from vllm.inputs.engine import tokens_input

    started = time.monotonic()
    sampling = SamplingParams(
        n=2, max_tokens=WARM_UP_TOKENS, temperature=0.7, top_p=0.9, logprobs=0, seed=0, ignore_eos=True
    )
    prompt = tokens_input([0] * WARM_UP_TOKENS, cache_salt="rlrun-warm-up")
    async for _ in engine.generate(prompt, sampling, "rlrun-warm-up"):
        pass
    logger.info("the engine answered its first request after {:.1f} s", time.monotonic() - started)
