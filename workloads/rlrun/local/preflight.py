"""What would go wrong later and can be said now, before anything is started or written."""

from __future__ import annotations

import re
import shutil
import socket
from collections.abc import Sequence
from pathlib import Path

from rlrun.config.run import RunConfig
from rlrun.local.plan import Ports
from rlrun.protocol import exit_codes
from rlrun.protocol.paths import RunPaths

MIN_FREE_BYTES = 64 * 1024 * 1024
"""Below this much space on the run's volume nothing useful can be written."""


class PreflightError(Exception):
    """The run cannot start; the message says why and what to do."""

    def __init__(self, message: str, exit_code: int = exit_codes.CONFIGURATION) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def free_port() -> int:
    """A port that nobody listens on at the moment."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def check_ports(ports: Ports) -> None:
    """Refuse ports that somebody listens on.

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


def check_folder(root: Path, *, resume: bool) -> None:
    """A folder that holds something is only used to resume the run in it.

    Raises:
        PreflightError: the folder is not empty, holds no run to resume, cannot be written, or its volume is full.
    """
    paths = RunPaths(root)
    if resume and not paths.run_json.is_file():
        raise PreflightError(
            f"--resume: {root} holds no run (there is no {paths.run_json.name}); leave --resume out to start one"
        )
    if not resume and root.is_dir() and any(root.iterdir()):
        raise PreflightError(
            f"{root} is not empty: add --resume to go on with the run in it, or choose another --output-dir"
        )
    try:
        root.mkdir(parents=True, exist_ok=True)
        probe = root / ".writable"
        probe.write_bytes(b"x")
        probe.unlink()
    except OSError as error:
        raise PreflightError(f"cannot write to {root}: {error.strerror}", exit_codes.STORAGE) from None
    free = shutil.disk_usage(root).free
    if free < MIN_FREE_BYTES:
        raise PreflightError(
            f"the volume of {root} is full: {free >> 20} MiB are free, a run needs at least {MIN_FREE_BYTES >> 20} MiB; "
            "make space or choose another --output-dir",
            exit_codes.STORAGE,
        )


def check_model(config: RunConfig) -> None:
    """A local model folder must be one.

    Raises:
        PreflightError: names the folder and what is missing in it.
    """
    given = config.trainer.model.path
    if given is None:
        return
    folder = Path(given)
    if not folder.is_dir():
        raise PreflightError(f"spec.model.path: there is no folder {given}", exit_codes.DATA)
    for what, pattern in (
        ("config.json", "config.json"),
        ("weights (*.safetensors)", "*.safetensors"),
        ("a tokenizer", "token*"),
    ):
        if not any(folder.glob(pattern)):
            raise PreflightError(
                f"spec.model.path: {given} holds no {what}; it must be a Hugging Face model folder "
                "(`rlrun tiny-model DIR` makes a tiny one)",
                exit_codes.DATA,
            )


def gpus() -> Sequence[int]:
    """Indices of the NVIDIA GPUs of this machine, without loading any library."""
    found = (re.fullmatch(r"nvidia(\d+)", path.name) for path in Path("/dev").glob("nvidia*"))
    return sorted(int(match[1]) for match in found if match)
