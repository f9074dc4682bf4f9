"""Engines and trainers on this machine that a run uses but did not start.

Engines are started by `inference @ FILE` for this run's folder, and a run does not stop them. A shared trainer belongs to a host run, whose
launcher writes the addresses to a file that the launcher of a guest run reads.
"""

from __future__ import annotations

import argparse
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

from pydantic import ValidationError

from rlrun.config.base import Config
from rlrun.config.models.run_config import RunConfig
from rlrun.local.preflight import PreflightError
from rlrun.local.process_plan import Ports
from rlrun.protocol.files import shared_trainer_files
from rlrun.protocol.files.durable import write_bytes
from rlrun.protocol.files.identity import read_identity
from rlrun.protocol.files.paths import RunPaths
from rlrun.runtime import exit_codes

OPTION = "--engine-url"
API_KEY_VARIABLE = "RLRUN_API_KEY"
_CONNECT_SECONDS = 5.0


def add_option(p: argparse.ArgumentParser) -> None:
    """Add the option of `rl` and `rlrun local`."""
    p.add_argument(
        OPTION,
        action="append",
        metavar="URL",
        help="an engine that already runs, started by `inference @ FILE` for this run's folder with the same RLRUN_API_KEY; it is not "
        "stopped at the end; repeat the option for more engines (default: start them here)",
    )


def check_engines(options: argparse.Namespace, config: RunConfig, paths: RunPaths) -> str:
    """Check that the engines of `--engine-url` can serve this run, and return their key.

    Raises:
        PreflightError: contains the option or variable, and the fix.
    """
    urls: Sequence[str] = options.engine_url
    if config.inference is None or config.trainer.shared_with is not None:
        raise PreflightError(f"{OPTION} ({urls[0]}): this run has no engines of its own; remove the option")
    if config.inference.colocated:
        raise PreflightError(
            f"{OPTION} ({urls[0]}): placement.colocate starts engines on the trainer's GPUs; remove one of them"
        )
    for name in ("inference_port", "inference_gpu_ids"):
        if getattr(options, name) is not None:
            raise PreflightError(
                f"--{name.replace('_', '-')} applies to engines that are started here; remove it, or remove {OPTION}"
            )
    for url in urls:
        _check_address(url)
    identity = read_identity(paths)
    if identity is not None and identity[0] != config.trainer.name:
        raise PreflightError(
            f"{OPTION} ({urls[0]}): the engine in {paths.root} was started for the run {identity[0]!r}, but this run is "
            f"{config.trainer.name!r}; give both the same name"
        )
    key = os.environ.get(API_KEY_VARIABLE, "")
    if not key:
        raise PreflightError(
            f"{OPTION} needs {API_KEY_VARIABLE} in the environment: the key that the engine was started with",
            exit_codes.USAGE,
        )
    return key


def _check_address(url: str) -> None:
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port or 80
    except ValueError:
        parts, host, port = urlsplit(""), None, 0
    if parts.scheme != "http" or not host or parts.path not in ("", "/"):
        raise PreflightError(f"{OPTION}: got {url!r}, expected the root of a server, such as http://127.0.0.1:8000")
    try:
        socket.create_connection((host, port), timeout=_CONNECT_SECONDS).close()
    except OSError as error:
        raise PreflightError(
            f"{OPTION}: no engine answers at {url} ({error.strerror or error}); start one with `inference @ FILE`, or remove {OPTION} "
            "to start one here",
            exit_codes.UNAVAILABLE,
        ) from None


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
    paths = shared_trainer_files.host_paths(root, host)
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
