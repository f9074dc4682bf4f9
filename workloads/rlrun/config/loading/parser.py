"""An argument parser with did-you-mean and the project's exit code, for every command that is not a configuration model."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Collection
from typing import Any, NoReturn

from rlrun.config.suggest import did_you_mean
from rlrun.runtime import exit_codes


class Parser(argparse.ArgumentParser):
    """argparse with our exit code, no abbreviations, and the closest known option for an unknown one."""

    def __init__(self, prog: str, description: str) -> None:
        super().__init__(prog, description=description, allow_abbrev=False, formatter_class=_fixed_width)
        self.also: Collection[str] = ()
        """Options that are taken out before, for the hint to a mistyped one."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Refuse what is not known here, in the subcommand that it was written for."""
        options, unknown = super().parse_known_args(args, namespace)
        if unknown:
            known = [*own_options(self), *self.also]
            name = unknown[0].partition("=")[0]
            kind = "option" if name.startswith("-") else "argument"
            self.error(f"unknown {kind} {name}{did_you_mean(name, known)}")
        return options, []

    def error(self, message: str) -> NoReturn:
        """Say what is wrong and end with the exit code of a wrong command line."""
        print(f"{self.prog}: {message}; see {self.prog} --help", file=sys.stderr)
        sys.exit(exit_codes.USAGE)


def own_options(parser: argparse.ArgumentParser) -> list[str]:
    """Names of a parser's options."""
    return [name for action in parser._actions for name in action.option_strings]


def _fixed_width(prog: str) -> argparse.HelpFormatter:
    return argparse.HelpFormatter(prog, max_help_position=28, width=100)
