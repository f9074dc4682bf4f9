"""Checks for later failures, before anything is started or written."""

from __future__ import annotations

import argparse
import os
import re
import secrets
import socket
import sys
import time
from collections import deque
from collections.abc import Iterable, Mapping
from pathlib import Path

from rlrun.config.models.model import ModelConfig
from rlrun.config.models.run import RunConfig
from rlrun.config.models.tracking import TrackingConfig
from rlrun.local.inputs import check_model_folder, check_model_weights
from rlrun.local.plan import Ports
from rlrun.protocol.files.failures import RoleError
from rlrun.protocol.files.launcher import LAUNCH_LOG, LAUNCH_MANIFEST, read_record
from rlrun.protocol.files.paths import RunPaths
from rlrun.protocol.files.run_folder import check_writable
from rlrun.runtime import exit_codes, extras
from rlrun.tracking.backends.missing import missing_trackers

_PORTS = range(15_000, 29_000)
"""Ports below those that the kernel gives to outgoing connections: such a connection could have the port before its process has started."""
_TRIES = 1000
_given: deque[int] = deque(maxlen=_TRIES)
"""Ports given lately: nobody may listen there yet."""
_CLAIMS = 64
_claims: deque[int] = deque()
"""Descriptors of sockets whose names tell other processes that a port is given, though nobody listens there yet."""


class PreflightError(RoleError):
    """Error for a run that cannot start; the message has the reason and the fix."""

    def __init__(self, message: str, code: int = exit_codes.CONFIGURATION) -> None:
        super().__init__(message, code)


def free_port() -> int:
    """A port that is free at the moment; each call gives another one, in whatever process of this machine.

    What another process was given lately is not given here: between this answer and the start of the one that is to listen there may be
    seconds, in which both would find it free.

    Raises:
        PreflightError: none is to be found.
    """
    for _ in range(_TRIES):
        port = secrets.choice(_PORTS)
        if port in _given:
            continue
        with socket.socket() as sock:
            try:
                sock.bind(("127.0.0.1", port))
            except OSError:
                continue
        if not _claim_port(port):
            continue
        _given.append(port)
        return port
    raise PreflightError(
        f"no free port among {_TRIES} of {_PORTS[0]} to {_PORTS[-1]}; name ports that are free", exit_codes.UNAVAILABLE
    )


def _claim_port(port: int) -> bool:
    """True if the port is this process's from now on, until it ends or has been given many others; always where there is no Linux."""
    if sys.platform != "linux":
        return True
    claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        claim.bind(f"\0rlrun-port-{port}")  # an abstract name: no file, and gone with the process
    except OSError:
        claim.close()
        return False
    if len(_claims) >= _CLAIMS:
        os.close(_claims.popleft())
    _claims.append(claim.detach())
    return True


def check_trackers(tracking: TrackingConfig | None, environ: Mapping[str, str]) -> None:
    """Refuse trackers that cannot work here.

    Raises:
        PreflightError: names each, and what to do.
    """
    found = [] if tracking is None else missing_trackers(tracking, environ)
    if found:
        raise PreflightError("; ".join(f"tracking.{name} {message}" for name, message in found))


def check_ports(ports: Ports) -> None:
    """Refuse ports that are in use.

    Raises:
        PreflightError: names the port, the role that needs it and the way out.
    """
    for name, port in ports.all().items():
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                sock.bind(("127.0.0.1", port))
            except OSError as error:
                option = f"--{name.split()[0].replace('orchestrator', 'metrics')}-port"
                raise PreflightError(
                    f"port {port} ({name}) cannot be used: {error.strerror}; end the program that listens there, or leave "
                    f"{option} out and a free port is taken",
                    exit_codes.UNAVAILABLE,
                ) from None


def check_folder(root: Path, *, resume: bool, engines: bool = False, take_over: bool = False) -> None:
    """Refuse a folder that holds something, unless the run in it is to be resumed, or `engines` were started for it.

    Args:
        root: folder of the run.
        resume: continue the run in it.
        engines: engines were started for it before.
        take_over: continue the run although another launcher runs it; that one ends when the next attempt begins.

    Raises:
        PreflightError: the folder is not empty, holds no run to resume, or another launcher runs it.
        RoleError: it cannot be written, or its volume is full.
    """
    paths = RunPaths(root)
    if resume and not paths.run_json.is_file():
        raise PreflightError(
            f"--resume: {root} holds no run (there is no {paths.run_json.name}); leave --resume out to start one"
        )
    if take_over and not resume:
        raise PreflightError("--take-over continues a run that another launcher runs; it needs --resume")
    record = read_record(paths.launcher)
    if resume and not take_over and record is not None and record.pid != os.getpid() and record.alive(time.time()):
        raise PreflightError(
            f"--resume: process {record.pid} on {record.host} runs attempt {record.attempt} in {root}: end it with "
            f"`kill -INT {record.pid}`, or add --take-over"
        )
    before = {LAUNCH_MANIFEST, LAUNCH_LOG} | ({paths.identity.name, paths.model.name, "logs"} if engines else set())
    if not resume and root.is_dir() and any(path.name not in before for path in root.iterdir()):
        raise PreflightError(
            f"{root} is not empty: add --resume to go on with the run in it, or choose another --output-dir"
        )
    check_writable(root, remedy="choose another --output-dir", private=True)


def check_model(model: ModelConfig) -> None:
    """Refuse a folder that is not a usable model folder.

    Raises:
        PreflightError: names the folder and what is missing in it.
    """
    for finding in [*check_model_folder(model, here=True)] or check_model_weights(model):
        raise PreflightError(f"spec.model.path: {finding.message}", exit_codes.DATA)


def check_packages(modules: Iterable[str]) -> None:
    """Refuse an installation that lacks what a run's roles import.

    Raises:
        PreflightError: names what is missing, and the command that installs it.
    """
    lack = extras.explain_lacking(modules, gpu=has_gpus())
    if lack is not None:
        raise PreflightError(lack, exit_codes.UNAVAILABLE)


def check_engine(gpus_per_replica: int) -> None:
    """Refuse an installation without an engine, and one whose engine is built for other machines than the run asks for.

    Raises:
        PreflightError: says what to install.
    """
    check_packages(extras.ENGINE)
    if (wrong := extras.wrong_engine(gpus_per_replica)) is not None:
        if gpus_per_replica and not has_gpus():  # another engine would find no GPU either
            raise PreflightError(
                f"spec.inference.gpusPerReplica is {gpus_per_replica}, and this machine has no NVIDIA GPU: run it where there "
                "are GPUs, or on this CPU with --trainer.gpus-per-replica 0 --inference.gpus-per-replica 0",
                exit_codes.UNAVAILABLE,
            )
        raise PreflightError(wrong, exit_codes.UNAVAILABLE)


def has_gpus() -> bool:
    """True if this machine has an NVIDIA GPU; loads no library."""
    return count_gpus() > 0


def count_gpus() -> int:
    """Return the number of NVIDIA GPUs of this machine; loads no library."""
    return sum(re.fullmatch(r"nvidia\d+", path.name) is not None for path in Path("/dev").glob("nvidia*"))


def refuse_options_of_the_host(options: argparse.Namespace, host: str) -> None:
    """Refuse options of trainer and engines, which a guest does not start.

    Raises:
        PreflightError: names the first of them.
    """
    for name in ("trainer_port", "inference_port", "trainer_gpu_ids", "inference_gpu_ids"):
        if getattr(options, name) is not None:
            raise PreflightError(
                f"--{name.replace('_', '-')} is an affair of {host}, whose trainer and engines this run uses "
                "(spec.trainer.sharedWith); leave it out"
            )


def choose_ports(options: argparse.Namespace, config: RunConfig) -> Ports:
    """Ports that the options name, and free ones for the rest.

    Raises:
        PreflightError: there are more or fewer than the run has engines.
    """
    starts = config.inference is not None and config.trainer.shared_with is None and not options.engine_url
    replicas = config.inference.replicas if starts and config.inference is not None else 0
    chosen = options.inference_port or [free_port() for _ in range(replicas)]
    if len(chosen) != replicas:
        without = "task SFT" if config.trainer.task == "SFT" else "--replay without spec.evaluation"
        wanted = f"spec.inference.replicas is {replicas}" if replicas else f"{without} runs no engine; leave it out"
        raise PreflightError(f"--inference-port names {len(chosen)} ports, {wanted}")
    return Ports(options.trainer_port or free_port(), free_port(), options.metrics_port or free_port(), tuple(chosen))
