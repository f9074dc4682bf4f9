"""`rlrun version`."""

from __future__ import annotations

import platform
from collections.abc import Sequence

from rlrun import __version__
from rlrun.api import API_VERSION
from rlrun.config.loading.parser import Parser
from rlrun.runtime import exit_codes


def version_parser() -> Parser:
    """Return the parser of `rlrun version`."""
    return Parser(prog="rlrun version", description="Print the version of the package, of the API and of Python.")


def run_version(argv: Sequence[str]) -> int:
    """Run the subcommand and return the exit code."""
    version_parser().parse_args(list(argv))
    print(f"rlrun {__version__} ({API_VERSION}, Python {platform.python_version()})")
    return exit_codes.OK
