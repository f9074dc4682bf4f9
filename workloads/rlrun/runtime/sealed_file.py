"""Files in memory that nobody can change, for programs that are started again next to code of users. Linux only."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

DESCRIPTORS = Path("/proc/self/fd")
"""Folder in which a process finds its open descriptors by number."""


def seal_file(content: bytes) -> int:
    """Return the descriptor of a file in memory with this content; no process can write, grow or shrink it.

    Raises:
        OSError: no memory, or too many open files.
    """
    descriptor = os.memfd_create("rlrun-sealed", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        with os.fdopen(descriptor, "wb", closefd=False) as file:
            file.write(content)
        fcntl.fcntl(
            descriptor,
            fcntl.F_ADD_SEALS,
            fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL,
        )
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def descriptor_path(descriptor: int) -> Path:
    """Return the path of a descriptor in the process that has it."""
    return DESCRIPTORS / str(descriptor)


def descriptors_in(path: Path) -> tuple[int, ...]:
    """Return the descriptor that a path names, for `pass_fds`; none if the path is an ordinary file's."""
    return (int(path.name),) if path.parent == DESCRIPTORS and path.name.isdigit() else ()
