"""Command lines that start a module of this package, and the folder of the user's own modules.

Each interpreter starts with `-P`. Without it, `-m` and `-c` put the working directory before the standard library: a file `queue.py` there
replaces Python's module, and an environment that can write there runs code in the process that holds the run's key.
"""

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


SAFE_PATH = "-P"
"""Option of Python (3.11 and newer): the working directory is not on the import path."""
HOST_MODULE = "rlrun.environments.process.host"
"""The first process of an environment's own container."""
SOCKETS_VARIABLE = "RLRUN_ENVIRONMENT_SOCKETS"
"""Environment variable of the orchestrator's container: the folder above those of environments that have containers of their own."""


SHARED_SOCKET_VARIABLE = "RLRUN_SHARED_ENVIRONMENTS_SOCKET"
"""Environment variable of the orchestrator's container: the socket of the container that environments without an image share."""


DEMONSTRATIONS_VARIABLE = "RLRUN_DEMONSTRATIONS"
"""Environment variable of a pod's container that makes the tiny model: the file that its warm-up learns from."""
DEMONSTRATIONS_FILE = "demonstrations.json"
"""Name of that file."""


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
    return [python or sys.executable, SAFE_PATH, "-c", START, str(Path(rlrun.__file__).parent), module, *arguments]


def module_command(module: str, arguments: Sequence[str] = (), *, unbuffered: bool = False) -> list[str]:
    """Return the command line that runs an installed module as `python -m` does, without the working directory on its import path.

    Args:
        module: name of the module.
        arguments: command-line arguments of the module.
        unbuffered: write output at once.
    """
    return [sys.executable, SAFE_PATH, *(["-u"] if unbuffered else []), "-m", module, *arguments]
