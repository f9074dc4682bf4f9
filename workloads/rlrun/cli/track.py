"""`rlrun track RUN_FOLDER`: send a run's missing metrics to its trackers, or all metrics to another tracker."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from rlrun.cli.common import report
from rlrun.config.loading.loader import load_file
from rlrun.config.loading.parser import Parser
from rlrun.config.loading.problems import ConfigError
from rlrun.config.models.run import RunConfig
from rlrun.protocol.files.durable import write_bytes
from rlrun.protocol.files.paths import RunPaths
from rlrun.runtime import exit_codes
from rlrun.tracking.backends.missing import missing_trackers
from rlrun.tracking.enabled import enabled_trackers
from rlrun.tracking.options import take_tracking, with_options
from rlrun.tracking.sink import main as run_sink


def track_parser() -> argparse.ArgumentParser:
    """Return the parser of `rlrun track`."""
    p = Parser(
        "rlrun track",
        "Send the metrics of a run that its trackers do not have yet. Options such as --wandb, --tensorboard or --mlflow.uri URL "
        "select other trackers.",
    )
    p.add_argument("run", help="the run's folder", metavar="RUN_FOLDER")
    return p


def run_track(argv: Sequence[str]) -> int:
    """Run the subcommand and return the exit code."""
    own, rest = take_tracking(argv)
    paths = RunPaths(Path(track_parser().parse_args(rest).run).absolute())
    if not paths.run_json.is_file():
        print(
            f"rlrun track: {paths.root} is not the folder of a run: {paths.run_json.name} is missing", file=sys.stderr
        )
        return exit_codes.USAGE
    try:
        config = load_file(RunConfig, paths.run_json)
        tracking = with_options(config.tracking, own)
    except ConfigError as error:
        return report(error)
    names = enabled_trackers(tracking, os.environ)
    if tracking is None or not names:
        print("rlrun track: the run has no tracker; add one, such as --tensorboard", file=sys.stderr)
        return exit_codes.USAGE
    if found := missing_trackers(tracking, os.environ):
        for name, message in found:
            print(f"rlrun track: tracking.{name} {message}", file=sys.stderr)
        return exit_codes.CONFIGURATION
    trainer = config.trainer.model_copy(update={"output_dir": str(paths.root)})  # the folder may have been moved
    file = paths.root / "tracking" / "run.json"
    try:
        document = config.model_copy(update={"tracking": tracking, "trainer": trainer})
        write_bytes(file, document.model_dump_json(by_alias=False).encode())
    except OSError as error:
        print(f"rlrun track: {file}: {error.strerror}", file=sys.stderr)
        return exit_codes.STORAGE
    code = run_sink(["--config", str(file), "--once"])
    if code == exit_codes.OK:
        print(f"{', '.join(names)}: all metrics are sent")
    return code
