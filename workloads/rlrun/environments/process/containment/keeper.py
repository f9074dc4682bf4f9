"""Keeper of an environment's process, and the search for and end of all processes of an environment.

The keeper is the process between the orchestrator and an environment's process. It is the subreaper of all its descendants: an orphan
becomes its child, even if the orphan has changed its session or its environment variables. Therefore the descendants of the keeper are
always exactly the processes of the environment, and the keeper ends after them. It runs no code of the environment. The parent of the
environment's process is the keeper and not the orchestrator, so a signal to the parent reaches only the keeper; where possible such signals
are denied (see `signal_guard`).

If the environment has killed its keeper, its processes are found by their session, by a mark in their environment variables, and by a list
of known processes. Linux only (/proc, prctl).
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rlrun.diagnostics import stacks
from rlrun.environments.process.containment import signal_guard
from rlrun.runtime.processes import processes_with, refuse_inspection

MARK_VARIABLE = "RLRUN_ENVIRONMENT_MARK"
"""Environment variable that every process of an environment inherits."""
KILL_SECONDS = 5.0
"""Longest wait for killed processes to end. A process inside a hanging file system cannot end."""
_PAGE = os.sysconf("SC_PAGE_SIZE")
_LOOK_SECONDS = 0.005

Known = tuple[int, int]
"""Process identity: pid and start time in ticks since boot, so that a reused pid is not mistaken for the same process."""


@dataclass(frozen=True)
class _Process:
    """Fields of /proc/PID/stat."""

    state: str
    parent: int
    session: int
    started: int
    resident_bytes: int


def _list_processes() -> dict[int, _Process]:
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError, IndexError, ValueError):  # the process has ended in the meantime
                # The name, in parentheses, can contain any characters; the other fields follow the last parenthesis.
                fields = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()
                process = _Process(fields[0], int(fields[1]), int(fields[3]), int(fields[19]), int(fields[21]) * _PAGE)
                found[int(entry.name)] = process
    return found


def _descendant_pids(leader: int, processes: dict[int, _Process]) -> set[int]:
    """Return the pids of all descendants of a process and of all processes of its session, without the process itself."""
    members = {leader} | {pid for pid, process in processes.items() if process.session == leader}
    # Repeat until the set stops growing: each pass adds the children of the processes found so far.
    size = -1
    while size != len(members):
        size = len(members)
        members |= {pid for pid, process in processes.items() if process.parent in members}
    return members - {leader}


@dataclass(frozen=True)
class Usage:
    """Current resource usage of an environment."""

    members: frozenset[Known]
    """Processes of the environment, without the keeper."""
    memory_bytes: int
    """Resident memory of all processes. Shared memory counts once if the kernel reports shares."""


def descendant_usage(leader: int, limit_bytes: int) -> Usage:
    """Return the resource usage of all descendants of a process and of its session.

    Args:
        leader: pid of the keeper.
        limit_bytes: memory above which the exact value is read, which is slow.
    """
    processes = _list_processes()
    members = _descendant_pids(leader, processes)
    resident = {pid: processes[pid].resident_bytes for pid in members if pid in processes}
    memory = sum(resident.values())
    if memory > limit_bytes:
        memory = sum(_proportional_memory(pid, otherwise) for pid, otherwise in resident.items())
    return Usage(frozenset((pid, processes[pid].started) for pid in resident), memory)


def _proportional_memory(pid: int, otherwise: int) -> int:
    """Memory of a process in bytes, with a proportional share of shared memory."""
    try:
        for line in Path("/proc", str(pid), "smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass
    return otherwise


def is_stopped(pid: int) -> bool:
    """Return whether a process was stopped by a signal and not continued."""
    try:
        return Path("/proc", str(pid), "stat").read_text(errors="replace").rpartition(")")[2].split()[0] in "Tt"
    except (OSError, IndexError):
        return False


def kill_descendants(leader: int, *, reap: Callable[[], object], known: Collection[Known] = ()) -> None:
    """Kill all descendants of a process and all known processes until none is left, but not the process itself.

    Args:
        leader: pid of the process.
        reap: function that is called after each round.
        known: former descendants.
    """
    _until_none(lambda: _living_pids(leader, known), reap)


def _living_pids(leader: int, known: Collection[Known]) -> set[int]:
    processes = _list_processes()
    again = {pid for pid, started in known if pid in processes and processes[pid].started == started}
    return {pid for pid in _descendant_pids(leader, processes) | again if processes[pid].state not in "ZX"}


def _until_none(find: Callable[[], Collection[int]], reap: Callable[[], object]) -> None:
    deadline = time.monotonic() + KILL_SECONDS
    while (left := find()) and time.monotonic() < deadline:
        for pid in left:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_LOOK_SECONDS)
        reap()


def kill_all(leader: int, mark: str, known: Collection[Known] = ()) -> None:
    """Kill all processes of an environment. The leader stays a zombie child of this process until it is collected.

    Args:
        leader: pid of the keeper, which may have ended.
        mark: value of `MARK_VARIABLE`.
        known: processes that were descendants of the keeper.
    """
    kill_descendants(leader, reap=lambda: None, known=known)
    # Until the leader is collected, its pid and its group's id cannot belong to another process.
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)
    _until_none(lambda: processes_with(MARK_VARIABLE, mark), lambda: None)


_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
STACKS = signal.SIGUSR1
"""Signal that the keeper forwards to the environment's process, which then writes its main thread's stack to its log."""
_HEARD = (signal.SIGCHLD, signal.SIGTERM, STACKS)


def end_with(parent: int, number: signal.Signals) -> None:
    """Request a signal for the end of the parent, or exit immediately if the parent has ended already."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:  # the parent ended before the request: the signal would never come
        os._exit(1)


def fork_kept(parent: int) -> None:
    """Fork: continue in the child, while this process becomes its keeper and never returns.

    Args:
        parent: pid of the orchestrator.
    """
    end_with(parent, signal.SIGTERM)
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    keeper = os.getpid()
    child = os.fork()
    if child == 0:
        end_with(keeper, signal.SIGKILL)
        if signal_guard.protect_ancestors(keeper):
            os.setsid()  # otherwise a signal to the child's own process group would reach the keeper
        return
    refuse_inspection()  # no filter limits the keeper's signals: a process that could write its memory could end the orchestrator
    # Blocked, so that no signal ends the keeper; `sigwait` in `_keep_child` receives the signals in `_HEARD`.
    signal.pthread_sigmask(signal.SIG_BLOCK, set(signal.valid_signals()))
    # The keeper needs no files: its copies would keep pipes and sockets open after the environment's process has ended.
    os.closerange(3, 1 << 20)
    _end_as(_keep_child(child))


def _keep_child(child: int) -> int:
    """Wait until the child has ended or this process has to end, and return the wait status to exit with."""
    while True:
        if (status := _reap_children(child)) is not None:
            break
        number = signal.sigwait(_HEARD)
        if number == STACKS:
            with suppress(OSError):  # the child has ended
                stacks.signal_main_thread(child, STACKS)
        elif number == signal.SIGTERM:
            status = int(signal.SIGTERM)
            break
    kill_descendants(os.getpid(), reap=lambda: _reap_children(child))
    return status


def _reap_children(child: int) -> int | None:
    """Collect all children that have ended, and return the wait status of `child` if it is one of them."""
    found = None
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == child:
                found = ended[1]
    return found


def _end_as(status: int) -> None:
    """Exit with the same status, or by the same signal, as another process."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        with suppress(OSError, ValueError):  # the handler of SIGKILL cannot be set
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
        os.kill(os.getpid(), number)
    os._exit(os.waitstatus_to_exitcode(status) if os.WIFEXITED(status) else 1)
