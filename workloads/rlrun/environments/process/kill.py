"""What belongs to an environment's process: its session, its descendants, and what it let go.

A process group alone is not enough, as a child may start a session of its own; nor are the descendants, as one whose
parent ended belongs to somebody else. Every process that the environment starts inherits a mark in its environment
variables, so all of them are found in the end. Linux only (/proc).
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rlrun.protocol.processes import processes_with

MARK_VARIABLE = "RLRUN_ENVIRONMENT_MARK"
"""Environment variable that every process of an environment inherits."""
KILL_SECONDS = 5.0
"""Longest wait for killed processes to end; one inside a hanging file system cannot."""
_PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class Usage:
    """What an environment takes at the moment."""

    processes: int
    memory_bytes: int
    """Resident memory of all its processes; what they share counts once, where the kernel tells."""


def usage(leader: int, limit_bytes: int) -> Usage:
    """What a session and its leader's descendants take.

    Args:
        leader: pid of the session's leader.
        limit_bytes: the exact figure, which is slow to get, is asked for only above this.
    """
    parents: dict[int, int] = {}
    resident: dict[int, int] = {}
    members = {leader}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError, IndexError, ValueError):  # gone meanwhile
                # The name, in parentheses, may hold anything: the fields follow the last one, beginning with the state.
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                pid = int(entry.name)
                parents[pid], resident[pid] = int(fields[1]), int(fields[21]) * _PAGE
                if int(fields[3]) == leader:
                    members.add(pid)
    size = -1
    while size != len(members):
        size = len(members)
        members |= {pid for pid, parent in parents.items() if parent in members}
    memory = sum(resident.get(pid, 0) for pid in members)
    if memory > limit_bytes:
        memory = sum(_proportional(pid, resident.get(pid, 0)) for pid in members)
    return Usage(len(members), memory)


def _proportional(pid: int, otherwise: int) -> int:
    """Memory of a process in bytes, with its share of what it shares."""
    try:
        for line in Path("/proc", str(pid), "smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass
    return otherwise


def kill_all(leader: int, mark: str) -> None:
    """Kill an environment's processes; the leader, a child of this process that nobody has collected yet, stays to be collected."""
    # Before the leader is collected neither its pid nor its group's id can belong to somebody else.
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)
    deadline = time.monotonic() + KILL_SECONDS
    while (left := processes_with(MARK_VARIABLE, mark)) and time.monotonic() < deadline:
        for pid in left:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)
