"""Engines that run already, each started by `inference @ FILE` for this run's folder: a run takes them, and leaves them running."""

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
    """Define the option of `rl` and `rlrun local`."""
    p.add_argument(
        OPTION,
        action="append",
        metavar="URL",
        help="an engine that runs already, started by `inference @ FILE` for this run's folder with the RLRUN_API_KEY that is set here, "
        "and goes on running afterwards; again for more of them (default: start them here)",
    )


def check_engines(options: argparse.Namespace, config: RunConfig, paths: RunPaths) -> str:
    """Check that the named engines can serve this run; returns their key.

    Raises:
        PreflightError: names the option or variable, and what to do.
    """
    urls: Sequence[str] = options.engine_url
    if config.inference is None or config.trainer.shared_with is not None:
        raise PreflightError(f"{OPTION} ({urls[0]}): this run has no engines of its own; leave it out")
    if config.inference.colocated:
        raise PreflightError(
            f"{OPTION} ({urls[0]}): placement.colocate starts engines on the trainer's GPUs; remove one of them"
        )
    for name in ("inference_port", "inference_gpu_ids"):
        if getattr(options, name) is not None:
            raise PreflightError(
                f"--{name.replace('_', '-')} is of engines that are started here; with {OPTION} leave it out"
            )
    for url in urls:
        _check_address(url)
    identity = read_identity(paths)
    if identity is not None and identity[0] != config.trainer.name:
        raise PreflightError(
            f"{OPTION} ({urls[0]}): the engine in {paths.root} was started for the run {identity[0]!r}, and this one is "
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
            f"{OPTION}: no engine answers at {url} ({error.strerror or error}); start one with `inference @ FILE`, or leave {OPTION} "
            "out and one is started here",
            exit_codes.UNAVAILABLE,
        ) from None
