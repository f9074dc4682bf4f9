"""Runs on one machine that share a trainer: the host's launcher writes its addresses to a file that a guest's launcher reads."""

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
    """Addresses of the host's trainer and engines. They are valid while the host's launcher runs."""

    trainer_url: str
    inference_urls: list[str]
    pid: int
    """Pid of the host's launcher."""


def shares_trainer(config: RunConfig) -> bool:
    """Return whether other runs can be trained in this run's trainer."""
    return config.trainer.lora is not None and config.trainer.lora.slots > 1


def offer_trainer(paths: RunPaths, ports: Ports) -> None:
    """Write the host's addresses, so that other runs can join."""
    endpoints = Endpoints(
        trainer_url=f"http://127.0.0.1:{ports.trainer}",
        inference_urls=[f"http://127.0.0.1:{port}" for port in ports.inference],
        pid=os.getpid(),
    )
    file = paths.shared / _FILE
    write_bytes(file, endpoints.model_dump_json().encode())


def withdraw_offer(paths: RunPaths) -> None:
    """Remove the host's addresses at its end, so that no other run joins."""
    (paths.shared / _FILE).unlink(missing_ok=True)


def endpoints_of(root: Path, host: str) -> Endpoints:
    """Return the addresses of the host's trainer and engines.

    Args:
        root: folder of the guest.
        host: name of the host run.

    Raises:
        PreflightError: the host does not run in a folder next to the guest's folder, or does not share its trainer.
    """
    paths = shared.host_paths(root, host)
    try:
        found = Endpoints.model_validate_json((paths.shared / _FILE).read_bytes())
        os.kill(found.pid, 0)
    except (OSError, ValidationError):
        raise PreflightError(
            f"spec.trainer.sharedWith ({host}): no run with spec.trainer.lora.slots of at least 2 is running in {paths.root}; "
            "start it first, in a folder next to this run's folder (--output-dir)",
            exit_codes.UNAVAILABLE,
        ) from None
    return found


def join_host(config: RunConfig, endpoints: Endpoints) -> RunConfig:
    """Return the guest's configuration with the host's addresses."""
    places = {"trainer_url": endpoints.trainer_url, "inference_urls": endpoints.inference_urls}
    return config.model_copy(update={"orchestrator": config.orchestrator.model_copy(update=places)})
