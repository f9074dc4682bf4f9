"""`rlrun render FILE`: print the resolved configuration of all roles, in the format of `run.json`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from rlrun.api.manifest import read_manifest
from rlrun.api.resolve import resolve_spec
from rlrun.api.variation import Variation, field_options, take_variation
from rlrun.cli.checks import defaults
from rlrun.cli.common import report
from rlrun.config.loading.parser import Parser, own_options
from rlrun.config.loading.problems import ConfigError
from rlrun.runtime import exit_codes

_UID = "00000000-0000-0000-0000-000000000000"
"""Uid in the output for a run that does not exist in a cluster yet."""


def render_parser() -> Parser:
    """Return the parser of `rlrun render`."""
    p = Parser(
        prog="rlrun render",
        description="Print run.json: the configuration of each role. Fields of spec are also options.",
    )
    p.add_argument("file", metavar="FILE", type=Path, help="an RLRun manifest")
    defaults.add_options(p)
    p.add_argument("--output-dir", help="the run's folder in the output (default: runs/<name>)")
    return p


def run_render(argv: Sequence[str]) -> int:
    """Run the subcommand and return the exit code."""
    rest, varied = take_variation(argv, own_options(p := render_parser()))
    p.also = field_options()
    options = p.parse_args(rest)
    try:
        lay = defaults.laid(options)
        manifest = read_manifest(options.file, Variation(varied, os.environ), lay)
        defaults.settled(lay, options.file, manifest.spec)
    except ConfigError as error:
        return report(error)
    name = manifest.metadata.name
    folder = options.output_dir or str(Path("runs") / name)
    config = resolve_spec(manifest.spec, name=name, uid=manifest.metadata.uid or _UID, output_dir=folder)
    print(config.model_dump_json(indent=2))
    return exit_codes.OK
