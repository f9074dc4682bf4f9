"""Command lines of processes, as they come and go."""

from __future__ import annotations

from pathlib import Path


def command_line(pid: int) -> str:
    """Words of a process's command line, apart by blanks; empty if it has ended meanwhile."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""
