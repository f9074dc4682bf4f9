"""Processes found by a mark that they inherit, their threads, and protection of this process and its files from others. Linux only."""

from __future__ import annotations

import ctypes
import fcntl
import os
import sys
from pathlib import Path

LAUNCH_VARIABLE = "RLRUN_LAUNCH_ID"
"""Environment variable of all processes of one launch on one machine."""
_PR_SET_DUMPABLE = 4
DESCRIPTORS = Path("/proc/self/fd")
"""Folder in which a process finds its open descriptors by number."""


def processes_with(variable: str, value: str) -> list[int]:
    """Pids of all processes that were started with this environment variable, this process and zombies excepted."""
    mark = f"{variable}={value}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            if mark in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
        except OSError:  # gone meanwhile, or not ours to read
            continue
    return found


def threads_of(pid: int) -> int | None:
    """Number of threads of a process; None: there is no such process."""
    try:
        # The name, in parentheses, may hold anything: the fields follow the last one.
        return int(Path("/proc", str(pid), "stat").read_text(errors="replace").rpartition(")")[2].split()[17])
    except (OSError, IndexError, ValueError):
        return None


def refuse_inspection() -> None:
    """Keep all other processes without rights of root from looking into this one and those that it forks, from now on.

    An environment's code runs as the user of the orchestrator that starts it. By default the kernel lets a user look into all processes of
    theirs: `/proc/PID/environ`, `mem`, `fd`, `cwd` and `root`, ptrace, process_vm_readv, pidfd_getfd. A process that is not dumpable is
    closed to them all (ptrace(2), "Ptrace access mode checking"; PR_SET_DUMPABLE(2const)); to root, with CAP_SYS_PTRACE, it is open. It
    writes no core file. A program that it starts begins dumpable again, so only processes whose memory holds a secret call this.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)


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
