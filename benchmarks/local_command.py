"""Command line of `rlrun local` for benchmarks."""

from __future__ import annotations

import sys
from pathlib import Path


def local_command(manifest: Path, folder: Path, *options: str) -> list[str]:
    """Return the command that runs a manifest on this machine with the Python of this process.

    Args:
        manifest: file of the run.
        folder: folder that the run writes.
        options: further options of `rlrun local`.
    """
    arguments = ["local", str(manifest), "--output-dir", str(folder), "--plain", *options]
    return [sys.executable, "-m", "rlrun.cli.main", *arguments]
