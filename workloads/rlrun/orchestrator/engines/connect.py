"""Connections to the engines of a run for the duration of an attempt."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from rlrun.config.models.roles import OrchestratorConfig
from rlrun.inference.client.engine_client import EngineClient
from rlrun.orchestrator.aio.background import Background
from rlrun.orchestrator.aio.condition import Signal
from rlrun.orchestrator.engines.discovery import Discovery, Resolve
from rlrun.orchestrator.engines.pool import EnginePool
from rlrun.orchestrator.engines.replica import Engine, Replica


@asynccontextmanager
async def open_engines(
    config: OrchestratorConfig,
    api_key: str,
    signal: Signal,
    background: Background,
    *,
    connect: Callable[[str], Engine] | None,
    look_up: Resolve,
    token_limit: int | None = None,
) -> AsyncIterator[EnginePool]:
    """Open the pool of engines: the configured list, or all addresses of the Service. Connections close at the end of
    the block.

    Args:
        config: addresses of the engines, and the timeouts of replies and weight updates.
        api_key: key of the run.
        signal: signal notified of every change in the pool.
        background: function that starts the endless discovery.
        connect: factory of an engine's client from its address. Default: over HTTP.
        look_up: resolver of the addresses of `inference_service`.
        token_limit: number of token ids of the model, or None if unknown.
    """

    def over_http(url: str) -> Engine:
        longest = max(environment.timeout_seconds for environment in config.environments)
        update = config.weight_sync.timeout_seconds
        return EngineClient(url, api_key, generate_timeout=longest, update_timeout=update)

    pool = EnginePool([], signal, max_concurrency=config.max_concurrency, token_limit=token_limit)
    open_one = connect or over_http
    try:
        if config.inference_service is None:
            for url in config.inference_urls:
                pool.add(Replica(url, open_one(url)))
        else:
            background(Discovery(config.inference_service, pool, connect=open_one, look_up=look_up).run())
        yield pool
    finally:
        for replica in pool.replicas:
            await replica.client.close()
