"""Processes found by a mark that they inherit. Linux only (/proc)."""

from __future__ import annotations

import os
from pathlib import Path


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
