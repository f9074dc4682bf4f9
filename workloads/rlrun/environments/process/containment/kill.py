"""Processes of an environment: descendants of its keeper, its session, and processes that carry its mark.

The keeper (see `keeper`) has every process of the environment among its descendants for as long as it lives. Should the environment
have killed it, what it started is found by a mark in its environment variables, and by having been seen before. Linux only (/proc).
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
"""Longest wait for killed processes to end; one inside a hanging file system cannot."""
_PAGE = os.sysconf("SC_PAGE_SIZE")
_LOOK_SECONDS = 0.005

Known = tuple[int, int]
"""A process: its pid, and when it started, in ticks since boot; so a pid that is used again is another one."""


@dataclass(frozen=True)
class _Process:
    """A line of /proc."""

    state: str
    parent: int
    session: int
    started: int
    resident_bytes: int


def _list_processes() -> dict[int, _Process]:
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError, IndexError, ValueError):  # gone meanwhile
                # The name, in parentheses, may hold anything: the fields follow the last one, beginning with the state.
                fields = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()
                process = _Process(fields[0], int(fields[1]), int(fields[3]), int(fields[19]), int(fields[21]) * _PAGE)
                found[int(entry.name)] = process
    return found


def _descendant_pids(leader: int, processes: dict[int, _Process]) -> set[int]:
    """Pids of what descends from a process or is of its session, itself excepted."""
    members = {leader} | {pid for pid, process in processes.items() if process.session == leader}
    size = -1
    while size != len(members):
        size = len(members)
        members |= {pid for pid, process in processes.items() if process.parent in members}
    return members - {leader}


@dataclass(frozen=True)
class Usage:
    """Present use of resources by an environment."""

    members: frozenset[Known]
    """Processes of the environment, the keeper excepted."""
    memory_bytes: int
    """Resident memory of all its processes; what they share counts once, where the kernel reports it."""


def descendant_usage(leader: int, limit_bytes: int) -> Usage:
    """Use of resources by all descendants of a process and its session.

    Args:
        leader: pid of the keeper.
        limit_bytes: the exact figure, which is slow to get, is asked for only above this.
    """
    processes = _list_processes()
    members = _descendant_pids(leader, processes)
    resident = {pid: processes[pid].resident_bytes for pid in members if pid in processes}
    memory = sum(resident.values())
    if memory > limit_bytes:
        memory = sum(_proportional_memory(pid, otherwise) for pid, otherwise in resident.items())
    return Usage(frozenset((pid, processes[pid].started) for pid in resident), memory)


def _proportional_memory(pid: int, otherwise: int) -> int:
    """Memory of a process in bytes, with its share of what it shares."""
    try:
        for line in Path("/proc", str(pid), "smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass
    return otherwise


def is_stopped(pid: int) -> bool:
    """True if a process was stopped by a signal and not continued."""
    try:
        return Path("/proc", str(pid), "stat").read_text(errors="replace").rpartition(")")[2].split()[0] in "Tt"
    except (OSError, IndexError):
        return False


def kill_descendants(leader: int, *, reap: Callable[[], object], known: Collection[Known] = ()) -> None:
    """Kill all that descends from a process, and what was seen to, until nothing of it is left; itself excepted.

    Args:
        leader: pid of the process.
        reap: called after each round.
        known: processes that descended from it once.
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
    """Kill an environment's processes; the leader stays as a zombie child of this process until it is collected.

    Args:
        leader: pid of the keeper, which may have ended.
        mark: value of `MARK_VARIABLE`.
        known: processes that were seen to descend from it.
    """
    kill_descendants(leader, reap=lambda: None, known=known)
    # Before the leader is collected neither its pid nor its group's id can belong to another process.
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)
    _until_none(lambda: processes_with(MARK_VARIABLE, mark), lambda: None)
