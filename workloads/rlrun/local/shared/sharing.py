"""Runs on one machine that share a trainer: the host's launcher leaves its addresses where a guest's launcher finds them."""

from __future__ import annotations

import os
from pathlib import Path

from pydantic import ValidationError

from rlrun.config.base import Config
from rlrun.config.models.run import RunConfig
from rlrun.local.plan import Ports
from rlrun.local.preflight import PreflightError
from rlrun.protocol.files import shared
from rlrun.protocol.files.durable import write_bytes
from rlrun.protocol.files.paths import RunPaths
from rlrun.runtime import exit_codes

_FILE = "local.json"


class Endpoints(Config):
    """Addresses of the host's trainer and engines, valid as long as its launcher lives."""

    trainer_url: str
    inference_urls: list[str]
    pid: int
    """Pid of the host's launcher."""


def shares_trainer(config: RunConfig) -> bool:
    """True if other runs may be trained in this run's trainer."""
    return config.trainer.lora is not None and config.trainer.lora.slots > 1


def offer_trainer(paths: RunPaths, ports: Ports) -> None:
    """Write the host's addresses."""
    endpoints = Endpoints(
        trainer_url=f"http://127.0.0.1:{ports.trainer}",
        inference_urls=[f"http://127.0.0.1:{port}" for port in ports.inference],
        pid=os.getpid(),
    )
    file = paths.shared / _FILE
    write_bytes(file, endpoints.model_dump_json().encode())


def withdraw_offer(paths: RunPaths) -> None:
    """Remove the host's addresses at its end: no other run joins."""
    (paths.shared / _FILE).unlink(missing_ok=True)


def endpoints_of(root: Path, host: str) -> Endpoints:
    """The addresses of the host's trainer and engines.

    Args:
        root: the guest's folder.
        host: name of the run whose trainer is shared.

    Raises:
        PreflightError: it does not run beside the guest's folder, or shares with nobody.
    """
    paths = shared.host_paths(root, host)
    try:
        found = Endpoints.model_validate_json((paths.shared / _FILE).read_bytes())
        os.kill(found.pid, 0)
    except (OSError, ValidationError):
        raise PreflightError(
            f"spec.trainer.sharedWith ({host}): no run with spec.trainer.lora.slots of at least 2 runs in {paths.root}; "
            "start it first, with its folder beside this run's (--output-dir)",
            exit_codes.UNAVAILABLE,
        ) from None
    return found


def join_host(config: RunConfig, endpoints: Endpoints) -> RunConfig:
    """The guest's configuration with the host's addresses."""
    places = {"trainer_url": endpoints.trainer_url, "inference_urls": endpoints.inference_urls}
    return config.model_copy(update={"orchestrator": config.orchestrator.model_copy(update=places)})
