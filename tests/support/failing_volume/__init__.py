"""A file system that fails on command: a library that is preloaded into a process, and the durable writes of the roles.

It needs no mount and no privilege, and faults reach code that Python cannot intercept, such as the Rust of safetensors.
FUSE is not available in every container.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
from pathlib import Path

SOURCE = Path(__file__).parent / "failing_volume.c"
NEVER = 10**9
KILL = 0
"""Value in place of an error number that kills the process."""


def build(folder: Path) -> Path:
    """Compile the library; return its path."""
    library = folder / "failing_volume.so"
    command = [
        "gcc",
        "-shared",
        "-fPIC",
        "-O1",
        "-Wall",
        "-Werror",
        "-o",
        str(library),
        str(SOURCE),
        "-ldl",
        "-lpthread",
    ]
    subprocess.run(command, check=True)
    return library


def environment(library: Path) -> dict[str, str]:
    """Return variables of a process that can arm its file system."""
    return os.environ | {"LD_PRELOAD": str(library), "OMP_NUM_THREADS": "1"}


class FailingVolume:
    """Operations below a folder of this process, which was started with the variables of `environment`."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(None)
        self._library.failing_volume_names.restype = ctypes.c_char_p

    def arm(self, folder: Path, *, first: int = NEVER, count: int = 1, number: int = 5, reads: bool = True) -> None:
        """Let operations `first` to `first + count - 1` below `folder` fail, counted from now on.

        Args:
            folder: resolved folder on the volume.
            first: number of the first failing operation, from 1.
            count: number of failing operations.
            number: error number, or `KILL`.
            reads: whether opens for reading count as well.
        """
        last = min(first + count - 1, 2 * NEVER)
        arm = self._library.failing_volume_arm
        arm(str(folder).encode(), ctypes.c_long(first), ctypes.c_long(last), number, int(reads))

    def disarm(self) -> int:
        """Stop all failures; return the number of operations since `arm`."""
        return int(self._library.failing_volume_disarm())

    def operations(self) -> list[str]:
        """Return names of the operations since `arm`, in order: create, write, sync, sync-folder, rename, link, mkdir,
        remove, truncate, open."""
        return str(self._library.failing_volume_names().decode()).split()
