"""`rlrun local FILE`: hands over to `rlrun.local`, which is imported only now."""

from __future__ import annotations

from collections.abc import Sequence


def run(argv: Sequence[str]) -> int:
    """Run the subcommand; returns the exit code."""
    from rlrun.local.main import main

    return main(argv)
