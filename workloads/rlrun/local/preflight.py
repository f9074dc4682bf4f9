"""Checks that find problems before anything is started or written."""

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

from rlrun.config.models.language_models import ModelConfig
from rlrun.config.models.run_config import RunConfig
from rlrun.config.models.trackers import TrackingConfig
from rlrun.local.process_plan import Ports
from rlrun.local.read_inputs import check_model_folder, check_model_weights
from rlrun.protocol.files.failures import RoleError
from rlrun.protocol.files.launcher_record import LAUNCH_LOG, LAUNCH_MANIFEST, read_record
from rlrun.protocol.files.paths import RunPaths
from rlrun.protocol.files.run_folder import check_writable
from rlrun.runtime import exit_codes, extras
from rlrun.tracking.backends.tracker_packages import missing_trackers

_PORTS = range(15_000, 29_000)
"""Ports below the kernel's range for outgoing connections. A port of that range could be taken before its process has started."""
_TRIES = 1000
_given: deque[int] = deque(maxlen=_TRIES)
"""Ports that were returned recently and whose process may not listen yet."""
_CLAIMS = 64
_claims: deque[int] = deque()
"""Descriptors of sockets with reserved names, by which other processes see that a port is assigned before its process listens."""


class PreflightError(RoleError):
    """Error for a run that cannot start. The message contains the reason and the fix."""

    def __init__(self, message: str, code: int = exit_codes.CONFIGURATION) -> None:
        super().__init__(message, code)


def free_port() -> int:
    """Return a port that is free. Each call returns a different port, also in different processes of this machine.

    Ports that another process got recently are skipped: the process for a port may start seconds later, and until then the port would look
    free to others.

    Raises:
        PreflightError: no free port was found.
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
        f"no free port among {_TRIES} of {_PORTS[0]} to {_PORTS[-1]}; choose free ports by options",
        exit_codes.UNAVAILABLE,
    )


def _claim_port(port: int) -> bool:
    """Reserve a port for this process until it ends or has reserved many others. Returns False if another process has it (Linux only)."""
    if sys.platform != "linux":
        return True
    claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        claim.bind(f"\0rlrun-port-{port}")  # an abstract name: it creates no file and disappears with the process
    except OSError:
        claim.close()
        return False
    if len(_claims) >= _CLAIMS:
        os.close(_claims.popleft())
    _claims.append(claim.detach())
    return True


def check_trackers(tracking: TrackingConfig | None, environ: Mapping[str, str]) -> None:
    """Reject trackers that cannot work on this machine.

    Raises:
        PreflightError: contains each tracker and its fix.
    """
    found = [] if tracking is None else missing_trackers(tracking, environ)
    if found:
        raise PreflightError("; ".join(f"tracking.{name} {message}" for name, message in found))


def check_ports(ports: Ports) -> None:
    """Reject ports that are in use.

    Raises:
        PreflightError: contains the port, the role that needs it and the fix.
    """
    for name, port in ports.ports_by_name().items():
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                sock.bind(("127.0.0.1", port))
            except OSError as error:
                option = f"--{name.split()[0].replace('orchestrator', 'metrics')}-port"
                raise PreflightError(
                    f"port {port} ({name}) cannot be used: {error.strerror}; end the program that uses it, or remove "
                    f"{option} to use a free port",
                    exit_codes.UNAVAILABLE,
                ) from None


def check_folder(root: Path, *, resume: bool, engines: bool = False, take_over: bool = False) -> None:
    """Reject a non-empty folder, unless its run is resumed or `engines` were started for it.

    Args:
        root: folder of the run.
        resume: whether to continue the run in the folder.
        engines: whether engines were started for the folder before.
        take_over: whether to continue the run although another launcher runs it. That launcher ends when the next attempt starts.

    Raises:
        PreflightError: the folder is not empty, has no run to resume, or another launcher runs it.
        RoleError: the folder cannot be written, or its volume is full.
    """
    paths = RunPaths(root)
    if resume and not paths.run_json.is_file():
        raise PreflightError(
            f"--resume: {root} contains no run ({paths.run_json.name} is missing); remove --resume to start one"
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
            f"{root} is not empty: add --resume to continue the run in it, or choose another --output-dir"
        )
    check_writable(root, remedy="choose another --output-dir", private=True)


def check_model(model: ModelConfig) -> None:
    """Reject a folder that is not a usable model folder.

    Raises:
        PreflightError: contains the folder and the missing part.
    """
    for finding in [*check_model_folder(model, here=True)] or check_model_weights(model):
        raise PreflightError(f"spec.model.path: {finding.message}", exit_codes.DATA)


def check_packages(modules: Iterable[str]) -> None:
    """Reject an installation without the packages that a run's roles import.

    Raises:
        PreflightError: contains the missing packages and the command that installs them.
    """
    lack = extras.explain_lacking(modules, gpu=has_gpus())
    if lack is not None:
        raise PreflightError(lack, exit_codes.UNAVAILABLE)


def check_engine(gpus_per_replica: int) -> None:
    """Reject an installation without an engine, or with an engine for other hardware than the run needs.

    Raises:
        PreflightError: contains the package to install.
    """
    check_packages(extras.ENGINE)
    if (wrong := extras.wrong_engine(gpus_per_replica)) is not None:
        if gpus_per_replica and not has_gpus():  # an engine for GPUs could not run here either
            raise PreflightError(
                f"spec.inference.gpusPerReplica is {gpus_per_replica}, but this machine has no NVIDIA GPU: run it on a machine with "
                "GPUs, or on this CPU with --trainer.gpus-per-replica 0 --inference.gpus-per-replica 0",
                exit_codes.UNAVAILABLE,
            )
        raise PreflightError(wrong, exit_codes.UNAVAILABLE)


def has_gpus() -> bool:
    """Return whether this machine has an NVIDIA GPU. Loads no library."""
    return count_gpus() > 0


def count_gpus() -> int:
    """Return the number of NVIDIA GPUs of this machine. Loads no library."""
    return sum(re.fullmatch(r"nvidia\d+", path.name) is not None for path in Path("/dev").glob("nvidia*"))


def refuse_options_of_the_host(options: argparse.Namespace, host: str) -> None:
    """Reject options of trainer and engines, which a guest run does not start.

    Raises:
        PreflightError: contains the first of the options.
    """
    for name in ("trainer_port", "inference_port", "trainer_gpu_ids", "inference_gpu_ids"):
        if getattr(options, name) is not None:
            raise PreflightError(
                f"--{name.replace('_', '-')} is an option of {host}, whose trainer and engines this run uses "
                "(spec.trainer.sharedWith); remove it"
            )


def choose_ports(options: argparse.Namespace, config: RunConfig) -> Ports:
    """Return the ports of the options, and free ports for the others.

    Raises:
        PreflightError: the number of inference ports differs from the number of engines.
    """
    starts = config.inference is not None and config.trainer.shared_with is None and not options.engine_url
    replicas = config.inference.replicas if starts and config.inference is not None else 0
    chosen = options.inference_port or [free_port() for _ in range(replicas)]
    if len(chosen) != replicas:
        without = "task SFT" if config.trainer.task == "SFT" else "--replay without spec.evaluation"
        wanted = (
            f"but spec.inference.replicas is {replicas}" if replicas else f"but {without} runs no engine; remove it"
        )
        raise PreflightError(f"--inference-port has {len(chosen)} ports, {wanted}")
    return Ports(options.trainer_port or free_port(), free_port(), options.metrics_port or free_port(), tuple(chosen))
