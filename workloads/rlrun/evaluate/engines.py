"""Engines that answer: started here as `rlrun local` starts a run's, or given by their address."""

from __future__ import annotations

import asyncio
import secrets
import shutil
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rlrun.config.models.run import RunConfig
from rlrun.inference.client.engine_client import EngineClient, EngineError, EngineUnavailableError
from rlrun.local.plan import GpuId, Ports, engine_processes, with_endpoints
from rlrun.local.preflight import check_engine, free_port
from rlrun.local.shared.gpus import Claim, claim_gpus
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
    """Folder below which they load weights; what is put there has to be taken away again."""
    supervisor: Supervisor | None = None
    """Supervisor of the engines that were started here."""
    root: Path = Path()
    """The folder of those that were started here."""

    async def watch(self) -> None:
        """Wait for an engine that was started here to end; it never may.

        Raises:
            RoleError: one has ended; what it said is printed.
        """
        while self.supervisor is not None:
            ended = self.supervisor.exited()
            if ended:
                explain_failure(ended[0], self.root)
                message = "everything is stopped; what was answered is kept"
                raise RoleError(message, exit_code_of(ended[0], self.root))
            await asyncio.sleep(_POLL_SECONDS)


@contextmanager
def own_engines(config: RunConfig, gpu_ids: Sequence[GpuId] | None, *, share_gpus: bool = False) -> Iterator[Engines]:
    """Start the engines that a configuration describes, and end them with the block.

    Args:
        config: its output folder gets the engines' files and logs.
        gpu_ids: the GPUs to use; None: as many as are needed.
        share_gpus: use GPUs that other runs of this machine use, too.

    Raises:
        PreflightError: the engine's package or GPUs are missing, or somebody else has them.
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
    shutil.rmtree(RunPaths(root).weights, ignore_errors=True)  # of a command that was killed
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
    """Engines that another program has started.

    Args:
        urls: their addresses.
        api_key: their key.
        weights: the folder of weights that they were started for.
    """
    yield Engines(urls, api_key, weights / f".evaluation-{secrets.token_hex(4)}")


async def check_given(clients: Sequence[EngineClient]) -> None:
    """Check that given engines are reachable and unused: their weights are about to change.

    Raises:
        RoleError: names the engine, and what to do.
    """
    for client in clients:
        url = client.base_url
        try:
            running = (await client.metrics()).running
        except EngineUnavailableError as error:
            raise RoleError(
                f"--engine-url: no engine answers at {url} ({error}); start one with `inference @ RUN_FOLDER/run.json`, or leave "
                "--engine-url out and one is started here",
                exit_codes.UNAVAILABLE,
            ) from None
        except EngineError as error:
            key = "; RLRUN_API_KEY has to be the key that it was started with" if error.status in _FORBIDDEN else ""
            raise RoleError(f"--engine-url: {error}{key}", exit_codes.CONFIGURATION) from None
        if running:
            raise RoleError(
                f"--engine-url: {url} answers {running} requests of somebody else, whose weights would be changed; name an engine "
                "that no run uses",
                exit_codes.UNAVAILABLE,
            )
