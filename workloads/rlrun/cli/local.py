"""`rlrun local FILE`: hands over to `rlrun.local`, which is imported only now."""

from __future__ import annotations

from collections.abc import Sequence

from rlrun.protocol import exit_codes

_ARGPARSE_ERROR = 2


def run(argv: Sequence[str]) -> int:
    """Run the subcommand; returns the exit code."""
    from rlrun.local.main import main

    try:
        return main(argv)
    except SystemExit as ended:
        if ended.code == _ARGPARSE_ERROR:
            return exit_codes.USAGE
        raise
