"""What the command lines share: an argument parser with did-you-mean, and how problems become an exit code."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from rlrun.config.arguments import COMMAND_LINE
from rlrun.config.problems import ConfigError
from rlrun.config.suggest import did_you_mean
from rlrun.protocol import exit_codes


class Parser(argparse.ArgumentParser):
    """argparse with our exit code, no abbreviations, and the closest known option for an unknown one."""

    def __init__(self, prog: str, description: str) -> None:
        super().__init__(prog, description=description, allow_abbrev=False, formatter_class=_fixed_width)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Refuse what is not known here, in the subcommand that it was written for."""
        options, unknown = super().parse_known_args(args, namespace)
        if unknown:
            known = [name for action in self._actions for name in action.option_strings]
            name = unknown[0].partition("=")[0]
            kind = "option" if name.startswith("-") else "argument"
            self.error(f"unknown {kind} {name}{did_you_mean(name, known)}")
        return options, []

    def error(self, message: str) -> NoReturn:
        """Say what is wrong and end with the exit code of a wrong command line."""
        print(f"{self.prog}: {message}; see {self.prog} --help", file=sys.stderr)
        sys.exit(exit_codes.USAGE)


def _fixed_width(prog: str) -> argparse.HelpFormatter:
    return argparse.HelpFormatter(prog, max_help_position=28, width=100)


def report(error: ConfigError) -> int:
    """Print every problem; the exit code tells a wrong command line from a wrong configuration."""
    print(error, file=sys.stderr)
    only_command_line = all(problem.source == COMMAND_LINE for problem in error.problems)
    return exit_codes.USAGE if only_command_line else exit_codes.CONFIGURATION


def arguments(argv: Sequence[str] | None) -> list[str]:
    """The command line without the program's name."""
    return list(sys.argv[1:] if argv is None else argv)
