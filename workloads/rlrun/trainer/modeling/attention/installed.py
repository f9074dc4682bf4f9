"""Devices and installed packages of attention kernels. Needs only torch, so that `rlrun doctor` can run it without transformers."""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
from functools import cache
from types import ModuleType

import torch

from rlrun.fit.attention_kernels import BACKENDS, NOT_INSTALLED, Kernel, Machine, Package


@cache
def read_machine(device: torch.device) -> Machine:
    """Describe a device and its kernel packages; packages are imported only if the device supports their kernels."""
    if device.type != "cuda":
        return Machine("a CPU" if device.type == "cpu" else f"a device of type {device.type}", None)
    capability = torch.cuda.get_device_capability(device)
    versions: dict[Kernel, str] = {}
    missing: dict[Kernel, str] = {}
    for kernel, backend in BACKENDS.items():
        first, last = backend.capabilities or (0, 0)
        if backend.package is None or not first <= capability[0] <= last:
            continue
        problem = problem_of(backend.package)
        if problem is None:
            versions[kernel] = version_of(backend.package)
        else:
            missing[kernel] = problem
    return Machine(torch.cuda.get_device_name(device), capability, versions, missing)


def problem_of(package: Package) -> str | None:
    """Return the reason why a package cannot be used, or None."""
    try:
        module = importlib.import_module(package.module)
    except ModuleNotFoundError as error:
        if error.name is not None and package.module.startswith(error.name):
            return f"{package.module} {NOT_INSTALLED}"
        return f"{package.module} needs {error.name}, which is not installed"
    except Exception as error:  # libraries built for another torch or CUDA raise many kinds of errors
        lines = str(error).strip().splitlines() or ["no message"]
        return f"{package.module} cannot be imported ({type(error).__name__}: {lines[0]})"
    if _is_namespace(module):
        return f"{package.module} {NOT_INSTALLED}"
    for name, arguments in package.functions.items():
        function = getattr(module, name, None)
        if function is None:
            return f"{package.module} {version_of(package)} has no {name}"
        taken = inspect.signature(function).parameters
        lacking = [argument for argument in arguments if argument not in taken]
        if lacking:
            return f"{package.module}.{name} of version {version_of(package)} does not take {', '.join(lacking)}"
    for name, arguments in package.operations.items():
        schemas = torch._C._jit_get_schemas_for_operator(name)
        if not schemas:
            return f"{package.module} {version_of(package)} registers no operation {name}"
        taken_names = {argument.name for argument in schemas[0].arguments}
        lacking = [argument for argument in arguments if argument not in taken_names]
        if lacking:
            return f"{name} of {package.module} {version_of(package)} does not take {', '.join(lacking)}"
    return None


def _is_namespace(module: ModuleType) -> bool:
    """Return whether a module is only a folder: FlashAttention 4 installs `flash_attn/cute` without a package `flash_attn`."""
    return module.__spec__ is not None and module.__spec__.loader is not None and module.__spec__.origin is None


def version_of(package: Package) -> str:
    """Return the version of an installed package, for messages."""
    for name in package.distributions:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return str(getattr(importlib.import_module(package.module), "__version__", "of unknown version"))
