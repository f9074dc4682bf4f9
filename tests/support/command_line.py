"""Command lines of live processes."""

from __future__ import annotations

from pathlib import Path


def command_line(pid: int) -> str:
    """Return a process's command line with its words separated by blanks, or an empty string if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""
