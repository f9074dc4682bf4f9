"""Engines of an evaluation: started on this machine like those of `rlrun local`, or given by their addresses."""

from __future__ import annotations

import asyncio
import secrets
import shutil
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rlrun.config.models.run_config import RunConfig
from rlrun.inference.client.engine_client import EngineClient, EngineError, EngineUnavailableError
from rlrun.local.gpus import Claim, claim_gpus
from rlrun.local.preflight import check_engine, free_port
from rlrun.local.process_plan import GpuId, Ports, engine_processes, with_endpoints
from rlrun.local.supervisor import Supervisor, exit_code_of, explain_failure
from rlrun.protocol.files.durable import write_bytes
from rlrun.protocol.files.failures import RoleError
from rlrun.protocol.files.paths import RunPaths
from rlrun.runtime import exit_codes

_POLL_SECONDS = 0.25
_FORBIDDEN = (401, 403)


@dataclass(frozen=True)
class Engines:
    """Addresses of the engines."""

    urls: Sequence[str]
    api_key: str
    weights: Path
    """Folder below which they load weights. All files placed there must be deleted afterwards."""
    supervisor: Supervisor | None = None
    """Supervisor of engines started by this command, or None."""
    root: Path = Path()
    """Folder of engines started by this command."""

    async def watch(self) -> None:
        """Wait for the end of an engine started by this command, which is always an error.

        Raises:
            RoleError: an engine has ended; its output is printed.
        """
        while self.supervisor is not None:
            ended = self.supervisor.poll_exited()
            if ended:
                explain_failure(ended[0], self.root)
                message = "all engines were stopped; finished answers are saved"
                raise RoleError(message, exit_code_of(ended[0], self.root))
            await asyncio.sleep(_POLL_SECONDS)


@contextmanager
def own_engines(config: RunConfig, gpu_ids: Sequence[GpuId] | None, *, share_gpus: bool = False) -> Iterator[Engines]:
    """Start the engines of a configuration, and stop them at the end of the block.

    Args:
        config: configuration; its output folder gets the engines' files and logs.
        gpu_ids: GPUs to use. None: as many as needed.
        share_gpus: whether to use GPUs of other runs on this machine.

    Raises:
        PreflightError: the engine's package or GPUs are missing, or the GPUs are in use.
    """
    assert config.inference is not None
    check_engine(config.inference.gpus_per_replica)
    root = Path(config.trainer.output_dir)
    with claim_gpus(config, [], gpu_ids, share=share_gpus) as claim:
        yield from _start_engine(config, root, claim)


def _start_engine(config: RunConfig, root: Path, claim: Claim) -> Iterator[Engines]:
    assert config.inference is not None
    ports = tuple(free_port() for _ in range(config.inference.replicas))
    configs = with_endpoints(config, Ports(free_port(), free_port(), free_port(), ports), None)
    files = [root / (f"engine.{i}.json" if i else "engine.json") for i in range(len(configs))]
    for file, document in zip(files, configs, strict=True):
        write_bytes(file, (document.model_dump_json(indent=1, by_alias=False) + "\n").encode())
    shutil.rmtree(RunPaths(root).weights, ignore_errors=True)  # left by a killed command
    launch_id, api_key = uuid.uuid4().hex, secrets.token_urlsafe(32)
    supervisor = Supervisor(launch_id, claim.descriptors)
    try:
        supervisor.start(engine_processes(configs, files, api_key=api_key, launch_id=launch_id, gpus=claim.inference))
        urls = [f"http://127.0.0.1:{port}" for port in ports]
        yield Engines(urls, api_key, RunPaths(root).weights, supervisor, root)
    finally:
        supervisor.stop()


@contextmanager
def given_engines(urls: Sequence[str], api_key: str, weights: Path) -> Iterator[Engines]:
    """Provide engines started by another program.

    Args:
        urls: addresses of the engines.
        api_key: key of the engines.
        weights: folder of weights for which they were started.
    """
    yield Engines(urls, api_key, weights / f".evaluation-{secrets.token_hex(4)}")


async def check_given(clients: Sequence[EngineClient]) -> None:
    """Check that given engines are reachable and unused, because their weights will change.

    Raises:
        RoleError: an engine is unusable; the message names it and a fix.
    """
    for client in clients:
        url = client.base_url
        try:
            running = (await client.metrics()).running
        except EngineUnavailableError as error:
            raise RoleError(
                f"--engine-url: no engine answers at {url} ({error}); start one with `inference @ RUN_FOLDER/run.json`, or omit "
                "--engine-url to start one on this machine",
                exit_codes.UNAVAILABLE,
            ) from None
        except EngineError as error:
            key = "; set RLRUN_API_KEY to the key with which it was started" if error.status in _FORBIDDEN else ""
            raise RoleError(f"--engine-url: {error}{key}", exit_codes.CONFIGURATION) from None
        if running:
            raise RoleError(
                f"--engine-url: {url} is answering {running} other requests, whose weights would change; use an engine without "
                "other clients",
                exit_codes.UNAVAILABLE,
            )
