"""`rlrun mirror RUN_FOLDER`: copy what a run has completed to object storage, where its own copies did not get to the end."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from rlrun.cli.common import report
from rlrun.config.loading.loader import load_file
from rlrun.config.loading.parser import Parser
from rlrun.config.loading.problems import ConfigError
from rlrun.config.models.checkpoint import MirrorConfig
from rlrun.config.models.run import RunConfig
from rlrun.protocol.files.paths import RunPaths
from rlrun.runtime import exit_codes


def parser() -> Parser:
    """The command line of `rlrun mirror`."""
    p = Parser(
        "rlrun mirror",
        "Copy the complete checkpoints and exports of a run to object storage. What is there already is not copied again.",
    )
    p.add_argument("run", help="the run's folder", metavar="RUN_FOLDER")
    p.add_argument("--url", help="a folder in object storage; default: storage.mirror.url of the run", metavar="URL")
    return p


def run(argv: Sequence[str]) -> int:
    """Run the subcommand; returns the exit code."""
    options = parser().parse_args(argv)
    paths = RunPaths(Path(options.run).absolute())
    if not paths.run_json.is_file():
        print(f"rlrun mirror: {paths.root} holds no run: it has no {paths.run_json.name}", file=sys.stderr)
        return exit_codes.USAGE
    try:
        config = load_file(RunConfig, paths.run_json)
    except ConfigError as error:
        return report(error)
    mirror = config.mirror
    if options.url is not None:
        try:
            about = {} if mirror is None else mirror.model_dump()
            mirror = MirrorConfig.model_validate(about | {"url": options.url})
        except ValueError as error:
            print(f"rlrun mirror: --url {options.url}: {str(error).splitlines()[-2].strip()}", file=sys.stderr)
            return exit_codes.USAGE
    if mirror is None:
        print(
            "rlrun mirror: the run names no object storage (storage.mirror); add --url, such as s3://bucket/runs",
            file=sys.stderr,
        )
        return exit_codes.USAGE
    from rlrun.mirror.main import Mirror
    from rlrun.mirror.remote import UnusableError

    try:
        copies = Mirror(paths, mirror, config.trainer.name)
        copies.copy_new()
    except UnusableError as error:
        print(f"rlrun mirror: {error}", file=sys.stderr)
        return exit_codes.CONFIGURATION
    except Exception as error:  # each file system has errors of its own
        print(f"rlrun mirror: {mirror.url} refuses: {type(error).__name__}: {error}", file=sys.stderr)
        return exit_codes.UNAVAILABLE
    print(f"{copies.url}: everything that is complete is there")
    return exit_codes.OK
