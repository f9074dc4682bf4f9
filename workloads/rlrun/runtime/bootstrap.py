"""Data files of an installation, command lines of this package's modules, and folders of environments' containers.

The data files are the Helm charts, the CRD and the examples.

Each interpreter starts with `-P`. Without it, `-m` and `-c` put the working directory before the standard library: a file `queue.py` there
would replace Python's module, and an environment with write access there would run code in the process with the run's key.
"""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Sequence
from pathlib import Path

import rlrun

_FOLDER = "share/rlrun"
"""Folder of a wheel's data files, below that of the environment (`[tool.setuptools.data-files]`)."""
_KNOWN = "charts"
"""One of their folders."""


def shipped_folder() -> Path | None:
    """Return the folder with `charts`, `crds` and `examples`, or None for an installation without them, such as an image.

    A checkout's own folders have precedence over those of a wheel, because an editable installation contains copies of an earlier state.
    """
    checkout = Path(rlrun.__file__).parents[2]
    if (checkout / "pyproject.toml").is_file() and (checkout / _KNOWN).is_dir():
        return checkout
    try:
        files = importlib.metadata.distribution("rlrun").files or []
    except importlib.metadata.PackageNotFoundError:
        return None
    for file in files:
        head, found, _ = file.as_posix().rpartition(f"{_FOLDER}/{_KNOWN}/")
        if found and not head.endswith("/" + _FOLDER):
            folder = Path(str(file.locate())).resolve()
            return next(parent for parent in folder.parents if parent.as_posix().endswith(_FOLDER))
    return None


START = """
import importlib, importlib.util, sys
folder, module, *rest = sys.argv[1:]
spec = importlib.util.spec_from_file_location("rlrun", folder + "/__init__.py", submodule_search_locations=[folder])
sys.modules["rlrun"] = package = importlib.util.module_from_spec(spec)
spec.loader.exec_module(package)
importlib.import_module(module).main(rest)
"""


SAFE_PATH = "-P"
"""Option of Python (3.11 and newer): the working directory is not on the import path."""
HOST_MODULE = "rlrun.environments.process.host"
"""Module of the first process in an environment's own container."""
SOCKETS_VARIABLE = "RLRUN_ENVIRONMENT_SOCKETS"
"""Environment variable of the orchestrator's container: parent folder of the folders of environments with their own containers."""


SHARED_SOCKET_VARIABLE = "RLRUN_SHARED_ENVIRONMENTS_SOCKET"
"""Environment variable of the orchestrator's container: socket of the container that environments without an image share."""


DEMONSTRATIONS_VARIABLE = "RLRUN_DEMONSTRATIONS"
"""Environment variable of the container that creates the tiny model: file with the data of its warm-up."""
DEMONSTRATIONS_FILE = "demonstrations.json"
"""Name of that file."""


def folder_of(folder: str, index: int) -> str:
    """Return the folder of `environments[index]`; only its container writes there."""
    return f"{folder}/{index}"


def socket_of(folder: str, index: int) -> str:
    """Return the socket of the host of `environments[index]`."""
    return f"{folder_of(folder, index)}/socket"


def python_command(module: str, arguments: Sequence[str], *, python: str | None = None) -> list[str]:
    """Return the command that calls `main(arguments)` of a module of exactly this package.

    Args:
        module: name of the module, `rlrun....`.
        arguments: arguments of its `main`.
        python: interpreter; None: this one.
    """
    return [python or sys.executable, SAFE_PATH, "-c", START, str(Path(rlrun.__file__).parent), module, *arguments]


def module_command(module: str, arguments: Sequence[str] = (), *, unbuffered: bool = False) -> list[str]:
    """Return the command line that runs an installed module as `python -m` does, without the working directory on its import path.

    Args:
        module: name of the module.
        arguments: command-line arguments of the module.
        unbuffered: whether to write output at once.
    """
    return [sys.executable, SAFE_PATH, *(["-u"] if unbuffered else []), "-m", module, *arguments]
