"""Control of processes: stop requests, searches, thread counts, and protection of memory and files.

A stop request reaches a process that waits in its main thread. Processes are found by an inherited environment variable. All functions
except those for stop requests are Linux only.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import os
import select
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path


class Ending:
    """Stop request that is made once and stays: a `threading.Event` that a signal handler may set.

    A signal handler runs in the main thread, at any point. Inside `Event.wait` that thread may hold the lock that `Event.set` needs, which
    would be a deadlock; a byte in a pipe needs no lock.
    """

    def __init__(self) -> None:
        self._asked = False
        self._reader, self._writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

    def set(self) -> None:
        """Make the request."""
        self._asked = True
        with suppress(BlockingIOError):
            os.write(self._writer, b"x")

    def is_set(self) -> bool:
        """Return whether the request was made."""
        return self._asked

    def wait(self, seconds: float | None = None) -> bool:
        """Wait for the request, at most `seconds` (None: without a limit). Returns whether it was made."""
        select.select([self._reader], [], [], seconds)
        return self._asked

    def fileno(self) -> int:
        """Descriptor for `select`, readable from the request on; its bytes are never consumed."""
        return self._reader


def on_sigterm(ask: Callable[[], None]) -> None:
    """Call `ask` at each SIGTERM; a signal during the interpreter's exit does not change the exit code.

    A helper process may get several: from its starter, from the kernel when the starting thread ends (PR_SET_PDEATHSIG), and from whatever
    ends all processes of a container. At its exit an interpreter resets handled signals to their default action, but keeps ignored ones
    ignored: without this, a late signal would kill a process that has finished its work, and the exit code would be wrong. The signal is
    not ignored earlier, because child processes inherit that, and would miss a request before they install their own handler.
    """
    signal.signal(signal.SIGTERM, lambda *_: ask())
    atexit.register(signal.signal, signal.SIGTERM, signal.SIG_IGN)


LAUNCH_VARIABLE = "RLRUN_LAUNCH_ID"
"""Environment variable of all processes of one launch on one machine."""
_PR_SET_DUMPABLE = 4
DESCRIPTORS = Path("/proc/self/fd")
"""Folder with the open descriptors of the current process, by number."""


def processes_with(variable: str, value: str) -> list[int]:
    """Return the pids of all processes that were started with this environment variable, except this process and zombies."""
    mark = f"{variable}={value}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            if mark in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
        except OSError:  # it has ended since, or belongs to another user
            continue
    return found


def threads_of(pid: int) -> int | None:
    """Return the number of threads of a process, or None if it does not exist."""
    try:
        # The name, in parentheses, may contain anything: the fields follow the last parenthesis.
        return int(Path("/proc", str(pid), "stat").read_text(errors="replace").rpartition(")")[2].split()[17])
    except (OSError, IndexError, ValueError):
        return None


def refuse_inspection() -> None:
    """Deny all other processes without root's rights access to the memory and files of this process and its forks, from now on.

    An environment's code runs as the user of the orchestrator that starts it. By default the kernel lets a user inspect all of its
    processes: `/proc/PID/environ`, `mem`, `fd`, `cwd` and `root`, ptrace, process_vm_readv, pidfd_getfd. A process that is not dumpable
    denies all of this (ptrace(2), "Ptrace access mode checking"; PR_SET_DUMPABLE(2const)), except to root with CAP_SYS_PTRACE. It writes no
    core file. A started program is dumpable again, so every process whose memory contains a secret must call this.
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
