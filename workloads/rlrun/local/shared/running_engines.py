"""Engines that already run, each started by `inference @ FILE` for this run's folder. A run uses them and does not stop them."""

from __future__ import annotations

import argparse
import os
import socket
from collections.abc import Sequence
from urllib.parse import urlsplit

from rlrun.config.models.run import RunConfig
from rlrun.local.preflight import PreflightError
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
