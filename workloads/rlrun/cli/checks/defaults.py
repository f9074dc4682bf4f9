"""Options of the commands that combine a manifest with an administrator's defaults."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rlrun.api.resource import RLRunSpec
from rlrun.config.loading.parser import Parser
from rlrun.config.loading.problems import ConfigError
from rlrun.defaults.given import Laid, read_given


def add_options(p: Parser) -> None:
    """Add `--defaults` and `--namespace` to a parser."""
    what = "file with the administrator's defaults for runs: the ConfigMap, or values of the operator's chart"
    p.add_argument("--defaults", metavar="FILE", type=Path, help=what)
    p.add_argument(
        "-n", "--namespace", default="", help="with --defaults: the run's namespace (default: the manifest's)"
    )


def laid(options: argparse.Namespace) -> Laid | None:
    """Read the file of `--defaults`; returns None without the option.

    Raises:
        ConfigError: the file contains no defaults.
    """
    return read_given(options.defaults, options.namespace) if options.defaults is not None else None


def settled(defaults: Laid | None, source: Path, spec: RLRunSpec) -> None:
    """Apply defaults to a specification, and print the applied fields to standard error.

    Raises:
        ConfigError: the manifest sets a locked field.
    """
    if defaults is None:
        return
    defaults.settle(spec)
    if problems := defaults.problems(str(source)):
        raise ConfigError(problems)
    for notice in defaults.notices(str(source)):
        print(" ".join(filter(None, (f"{notice.source}: note:", notice.path, notice.message))), file=sys.stderr)
