"""Find and kill the processes of an environment: descendants of its keeper, processes of its session, and processes with its mark.

While the keeper lives (see `keeper`), every process of the environment is its descendant. If the environment has killed the keeper, its
processes are found by a mark in their environment variables and by a list of known processes. Linux only (/proc).
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rlrun.runtime.processes import processes_with

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
