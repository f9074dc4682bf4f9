"""An engine without vLLM: `python -m tests.support.stub.inference --config run.json`.

Guard, `/rlrun` routes, hand-over, preflight and heartbeat are the real server's code with another engine. Of vLLM's own
routes it has those that the roles and probes use: `/health`, `/metrics`, `/v1/models` and `/inference/v1/generate`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import socket
import sys
import time
from array import array
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from loguru import logger
from pydantic import BaseModel, ConfigDict, Field

from rlrun.config.loading.loader import load_file
from rlrun.config.loading.problems import ConfigError
from rlrun.config.models.roles import InferenceConfig
from rlrun.diagnostics import stacks
from rlrun.inference.engine_settings import InferenceSettings, SettingsError, settings_from_config
from rlrun.inference.guard import Guard
from rlrun.inference.heartbeat import Heartbeat
from rlrun.inference.http.generate import (
    CLIENT_GONE,
    GONE,
    GenerateError,
    Head,
    SampledTokens,
    Sampling,
    generate_router,
    unless_gone,
)
from rlrun.inference.http.routes import Control, router
from rlrun.inference.weights.handover import Handover, HandoverOptions
from rlrun.inference.weights.lora_adapters import AdapterHandover, AdapterServer
from rlrun.inference.weights.preflight import FolderError, Shapes, check_model
from rlrun.inference.weights.sleeping import DROP_WEIGHTS, KEEP_WEIGHTS, Sleeper, SleepGate
from rlrun.protocol.files.failures import RoleError, write_error
from rlrun.protocol.messages.endpoints import ENGINE_GENERATE, ENGINE_HEALTH, ENGINE_METRICS
from rlrun.protocol.messages.packed_columns import FLOATS, INTEGERS
from rlrun.runtime import exit_codes, process_logs
from tests.support.stub.engine import AdapterRequest, Choice, StubEngine
from tests.support.stub.script import InferenceScript, load_script

TERMINATED = 128 + signal.SIGTERM
ANSWER_SECONDS = 1.0
KEEP_ALIVE_SECONDS = 75
"""Keep-alive time, as in the real server: longer than the client keeps a connection."""


class StockSampling(Sampling):
    """vLLM's parameters, with its default length; the stub ignores some of them, such as temperature."""

    model_config = ConfigDict(extra="ignore")
    max_tokens: Annotated[int, Field(ge=1)] = 16


class GenerateRequest(BaseModel):
    """Body of `/inference/v1/generate`; other sampling parameters of vLLM are accepted and ignored."""

    token_ids: Annotated[list[int], Field(min_length=1)]
    sampling_params: StockSampling
    request_id: str = ""
    model: str | None = None
    """Name of an adapter, or of the served model, which is the default."""


class StubTokens:
    """The stub's engine as a `TokenEngine`.

    Args:
        engine: engine that samples.
        settings: the served model's name, and the longest sequence.
    """

    def __init__(self, engine: StubEngine, settings: InferenceSettings) -> None:
        self._engine, self._settings = engine, settings

    async def choices(self, head: Head, prompt: Sequence[int]) -> tuple[str, list[Choice]]:
        """Return the name of the model and the continuations; raise `GenerateError`."""
        longest, sampling = self._settings.max_model_len or 2**31, head.sampling_params
        if len(prompt) >= longest:
            raise GenerateError(f"the prompt has {len(prompt)} tokens; the longest sequence is {longest}", 400)
        name = head.model if head.model != self._settings.served_model_name else None
        if name is not None and name not in self._engine.registry:
            raise GenerateError(f"the model {name} does not exist", GONE)
        choices = await self._engine.generate(
            prompt,
            n=sampling.n,
            max_tokens=min(sampling.max_tokens, longest - len(prompt)),
            stop=sampling.stop_token_ids,
            ignore_eos=sampling.ignore_eos,
            seed=sampling.seed,
            adapter=name,
        )
        return name or self._settings.served_model_name, choices

    async def sample_tokens(self, head: Head, prompt: array[int]) -> tuple[str, list[SampledTokens]]:
        """See `TokenEngine`."""
        model, choices = await self.choices(head, prompt)
        return model, [
            SampledTokens(
                array(INTEGERS, [sampled.token for sampled in choice.tokens]),
                array(FLOATS, [sampled.logprob for sampled in choice.tokens]),
                [(span["version"], span["start"], span["end"]) for span in choice.spans()],
                choice.finish_reason or "stop",
            )
            for choice in choices
        ]


def application(engine: StubEngine, settings: InferenceSettings, control: Control) -> FastAPI:
    """Return the server's app, without its guard."""
    app = FastAPI(openapi_url=None)
    app.include_router(router)
    app.state.rlrun = control
    tokens = StubTokens(engine, settings)

    @app.api_route(ENGINE_HEALTH, methods=["GET", "HEAD"])
    async def health() -> Response:
        return Response()

    @app.api_route(ENGINE_METRICS, methods=["GET", "HEAD"])
    async def metrics() -> PlainTextResponse:
        labels = f'{{engine="0",model_name="{settings.served_model_name}"}}'
        values = {"num_requests_running": engine.running, "num_requests_waiting": 0, "kv_cache_usage_perc": 0}
        values["num_preemptions_total"] = 0
        return PlainTextResponse("".join(f"vllm:{name}{labels} {value}\n" for name, value in values.items()))

    @app.api_route("/v1/models", methods=["GET", "HEAD"])
    async def models() -> dict[str, Any]:
        card = {"id": settings.served_model_name, "object": "model", "root": settings.model_path}
        return {"object": "list", "data": [card]}

    @app.post(ENGINE_GENERATE)
    async def generate(request: Request, body: GenerateRequest) -> Response:
        head = Head(tokens=len(body.token_ids), sampling_params=body.sampling_params, model=body.model)
        try:
            answer = await unless_gone(request, lambda: tokens.choices(head, body.token_ids))
        except GenerateError as error:
            code = 404 if error.status == GONE else error.status  # as vLLM answers for an unknown model
            return JSONResponse({"error": {"code": code, "message": str(error)}}, status_code=code)
        if answer is None:
            return Response(status_code=CLIENT_GONE)
        model, choices = answer
        documents = [_document(i, choice) for i, choice in enumerate(choices)]
        return JSONResponse({"request_id": body.request_id, "model": model, "choices": documents})

    app.include_router(generate_router(tokens))
    return app


def _document(index: int, choice: Choice) -> dict[str, Any]:
    content = [{"token_id": sampled.token, "logprob": sampled.logprob} for sampled in choice.tokens]
    return {
        "index": index,
        "token_ids": [sampled.token for sampled in choice.tokens],
        "logprobs": {"content": content},
        "finish_reason": choice.finish_reason,
        "weight_versions": choice.spans(),
    }


def serve(settings: InferenceSettings, script: InferenceScript, run_folder: Path) -> int:
    """Serve until SIGTERM or SIGINT; the exit codes are those of `rlrun.inference.engine_server.serve_engine`.

    Raises:
        RoleError: the model folder or the address cannot be used.
    """
    try:
        expected = check_model(settings)
    except FolderError as error:
        raise RoleError(str(error), exit_codes.DATA) from None
    if expected is None:
        raise RoleError(f"model.name is {settings.model_path}: the stub image runs model.tiny", exit_codes.DATA)
    try:
        family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
        listener = socket.create_server((settings.host, settings.port), family=family, backlog=2048)
    except OSError as error:
        raise RoleError(
            f"cannot listen on {settings.host}:{settings.port}: {error.strerror}; stop the process that uses the port, "
            "or choose another port",
            exit_codes.UNAVAILABLE,
        ) from None
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: os._exit(TERMINATED))
    with listener:
        time.sleep(script.start_seconds)
        return asyncio.run(_serve(settings, script, run_folder, listener, expected))


async def _serve(
    settings: InferenceSettings, script: InferenceScript, run_folder: Path, listener: socket.socket, expected: Shapes
) -> int:
    engine = StubEngine(Path(settings.model_path), seed=settings.seed, script=script, run_folder=run_folder)
    handover = _handover(engine, settings, expected)
    heartbeat = Heartbeat(
        lambda: engine.collective_rpc("check_health"),
        interval=settings.heartbeat_interval,
        timeout=settings.heartbeat_timeout,
    )
    app = application(engine, settings, Control(handover, heartbeat))
    config = uvicorn.Config(
        Guard(SleepGate(app, lambda: handover.asleep), settings.api_key),
        log_level="warning",
        access_log=False,
        lifespan="off",
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=1,
    )
    server = uvicorn.Server(config)
    for number in (signal.SIGTERM, signal.SIGINT):
        # uvicorn restores the signal handlers and raises the signals again; this subclass keeps our exit code.
        signal.signal(number, server.handle_exit)
    if settings.colocated:
        await handover.sleep()
    async with _running(heartbeat):
        logger.info(f"the engine without vLLM serves on {settings.host}:{settings.port}")
        await server.serve(sockets=[listener])
    return exit_codes.FAILURE if handover.fault is not None else exit_codes.OK


def _handover(engine: StubEngine, settings: InferenceSettings, expected: Shapes) -> Handover:
    level = DROP_WEIGHTS if settings.max_lora_rank is None else KEEP_WEIGHTS
    sleeper = Sleeper(engine, level=level) if settings.colocated else None
    options = HandoverOptions(
        base_model=settings.model_path,
        weights_dir=settings.weights_dir,
        expected=expected if settings.max_lora_rank is None else None,  # the stub lacks the layers of its adapters
        timeout=settings.update_timeout,
        on_broken=_stop_soon,
    )
    if settings.max_lora_rank is None:
        return Handover(engine, options, sleeper=sleeper)
    return AdapterHandover(
        engine,
        AdapterServer(
            served_name=settings.served_model_name,
            registry=engine.registry,
            in_use=engine.in_use,
            make_request=AdapterRequest,
            max_rank=settings.max_lora_rank,
            runs=settings.lora_runs,
        ),
        options,
        sleeper=sleeper,
    )


def _stop_soon() -> None:
    """Stop this server like a signal from outside, after it has sent the answer with the reason."""
    asyncio.get_running_loop().call_later(ANSWER_SECONDS, os.kill, os.getpid(), signal.SIGTERM)


@contextlib.asynccontextmanager
async def _running(heartbeat: Heartbeat) -> AsyncIterator[None]:
    await heartbeat.check_workers()
    task = asyncio.create_task(heartbeat.run())
    try:
        yield
    finally:
        task.cancel()


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line and serve; return the exit code."""
    process_logs.configure_log(sys.stderr, "{time:HH:mm:ss} | {level: <7} | inference | {message}")
    parser = argparse.ArgumentParser(
        prog="python -m tests.support.stub.inference", description="Serve a run without vLLM."
    )
    parser.add_argument("--config", type=Path, required=True, help="the run's resolved configuration, run.json")
    options = parser.parse_args(argv)
    try:
        config = load_file(InferenceConfig, options.config, section="inference")
        settings = settings_from_config(config, api_key=os.environ.get("RLRUN_API_KEY", ""))
        folder = Path(config.output_dir)
        stacks.answer_requests()
        return serve(settings, load_script(folder).inference, folder)
    except (SettingsError, ConfigError) as error:
        failure = RoleError(" / ".join(str(error).splitlines()), exit_codes.CONFIGURATION)
    except RoleError as error:
        failure = error
    print(f"inference: {failure}", file=sys.stderr, flush=True)
    write_error(None, "inference", failure)
    return failure.code


if __name__ == "__main__":
    sys.exit(main())
