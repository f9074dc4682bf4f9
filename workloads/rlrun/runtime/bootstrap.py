"""Start of a module of this package in another process, also by a Python that has other packages and not this one."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import rlrun

START = """
import importlib, importlib.util, sys
folder, module, *rest = sys.argv[1:]
spec = importlib.util.spec_from_file_location("rlrun", folder + "/__init__.py", submodule_search_locations=[folder])
sys.modules["rlrun"] = package = importlib.util.module_from_spec(spec)
spec.loader.exec_module(package)
importlib.import_module(module).main(rest)
"""


HOST_MODULE = "rlrun.environments.process.host"
"""The first process of an environment's own container."""
SOCKETS_VARIABLE = "RLRUN_ENVIRONMENT_SOCKETS"
"""Environment variable of the orchestrator's container: the folder above those of environments that have containers of their own."""


def folder_of(folder: str, index: int) -> str:
    """Folder of `environments[index]`, which its container alone writes."""
    return f"{folder}/{index}"


def socket_of(folder: str, index: int) -> str:
    """Socket of the host of `environments[index]`."""
    return f"{folder_of(folder, index)}/socket"


def python_command(module: str, arguments: Sequence[str], *, python: str | None = None) -> list[str]:
    """The command that calls `main(arguments)` of a module of this very package.

    Args:
        module: its name, `rlrun....`.
        arguments: for its `main`.
        python: the interpreter; None: this one.
    """
    return [python or sys.executable, "-c", START, str(Path(rlrun.__file__).parent), module, *arguments]
