"""`rlrun local FILE`: run all roles on this machine. `rlrun.local` is imported only when the command runs."""

from __future__ import annotations

from collections.abc import Sequence


def run_local(argv: Sequence[str]) -> int:
    """Run the subcommand and return the exit code."""
    from rlrun.local.main import main

    return main(argv)
