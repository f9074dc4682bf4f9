"""Processes found by a mark that they inherit, and their threads counted. Linux only (/proc)."""

from __future__ import annotations

import os
from pathlib import Path

LAUNCH_VARIABLE = "RLRUN_LAUNCH_ID"
"""Environment variable of all processes of one launch on one machine."""


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
