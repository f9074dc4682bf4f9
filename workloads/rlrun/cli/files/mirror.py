"""`rlrun mirror RUN_FOLDER`: copy a run's complete checkpoints and exports to object storage if the run did not copy all of them."""

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


def mirror_parser() -> Parser:
    """Return the parser of `rlrun mirror`."""
    p = Parser(
        "rlrun mirror",
        "Copy the complete checkpoints and exports of a run to object storage. Existing copies are kept.",
    )
    p.add_argument("run", help="the run's folder", metavar="RUN_FOLDER")
    p.add_argument("--url", help="a folder in object storage; default: storage.mirror.url of the run", metavar="URL")
    return p


def run_mirror(argv: Sequence[str]) -> int:
    """Run the subcommand and return the exit code."""
    options = mirror_parser().parse_args(argv)
    paths = RunPaths(Path(options.run).absolute())
    if not paths.run_json.is_file():
        print(
            f"rlrun mirror: {paths.root} is not the folder of a run: {paths.run_json.name} is missing", file=sys.stderr
        )
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
            "rlrun mirror: storage.mirror of the run is not set; add --url, such as s3://bucket/runs",
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
    except Exception as error:  # each fsspec file system raises its own error classes
        print(f"rlrun mirror: cannot write to {mirror.url}: {type(error).__name__}: {error}", file=sys.stderr)
        return exit_codes.UNAVAILABLE
    print(f"{copies.url}: all complete checkpoints and exports are copied")
    return exit_codes.OK
