"""Options of the commands that lay a manifest over a team's defaults."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rlrun.api.resource import RLRunSpec
from rlrun.config.loading.parser import Parser
from rlrun.config.loading.problems import ConfigError
from rlrun.defaults.given import Laid, read_given


def add_options(p: Parser) -> None:
    """`--defaults` and `--namespace`."""
    what = "defaults for runs, as an administrator gives them: the ConfigMap, or the values of the operator's chart"
    p.add_argument("--defaults", metavar="FILE", type=Path, help=what)
    p.add_argument(
        "-n", "--namespace", default="", help="with --defaults: the run's namespace (default: the manifest's)"
    )


def laid(options: argparse.Namespace) -> Laid | None:
    """The defaults that the options name; None: none.

    Raises:
        ConfigError: the file has none.
    """
    return read_given(options.defaults, options.namespace) if options.defaults is not None else None


def settled(defaults: Laid | None, source: Path, spec: RLRunSpec) -> None:
    """Say on stderr what a manifest took.

    Raises:
        ConfigError: a locked field is in the way.
    """
    if defaults is None:
        return
    defaults.settle(spec)
    if problems := defaults.problems(str(source)):
        raise ConfigError(problems)
    for notice in defaults.notices(str(source)):
        print(" ".join(filter(None, (f"{notice.source}: note:", notice.path, notice.message))), file=sys.stderr)
