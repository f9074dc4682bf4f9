"""`rlrun export`, `mirror` and `track`: a run's model, checkpoints and metrics for other places.

- `export RUN_FOLDER --output DIR` writes a Hugging Face model folder from a run's checkpoint.
- `mirror RUN_FOLDER` copies a run's complete checkpoints and exports to object storage if the run did not copy all of them.
- `track RUN_FOLDER` sends a run's missing metrics to its trackers, or all metrics to another tracker.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from rlrun.cli.command_options import report_problems
from rlrun.config.loading.loader import load_file
from rlrun.config.loading.parser import Parser, whole_number
from rlrun.config.loading.problems import ConfigError
from rlrun.config.models.checkpoint import MirrorConfig
from rlrun.config.models.language_models import DType
from rlrun.config.models.run_config import RunConfig
from rlrun.local.preflight import check_packages
from rlrun.protocol.files.durable import write_bytes
from rlrun.protocol.files.failures import RoleError
from rlrun.protocol.files.paths import RunPaths
from rlrun.protocol.files.recorded_code import FLAG, HELP
from rlrun.runtime import exit_codes, extras
from rlrun.tracking.backends.tracker_packages import missing_trackers
from rlrun.tracking.enabled import enabled_trackers
from rlrun.tracking.options import take_tracking, with_options
from rlrun.tracking.sink import main as run_sink


def export_parser() -> argparse.ArgumentParser:
    """Return the parser of `rlrun export`."""
    p = Parser("rlrun export", "Write a model folder for transformers and vLLM from a checkpoint of a run.")
    p.add_argument("run", help="the run's folder", metavar="RUN_FOLDER")
    p.add_argument("--output", required=True, metavar="DIR", help="a new folder for the model")
    p.add_argument(
        "--step",
        type=whole_number(1),
        metavar="N",
        help="step of the checkpoint (default: the newest complete checkpoint)",
    )
    p.add_argument(
        "--dtype",
        choices=get_args(DType),
        help="dtype of the weights (default: the dtype that the run publishes)",
    )
    p.add_argument(FLAG, action="store_true", help=HELP)
    return p


def run_export(argv: Sequence[str]) -> int:
    """Run the subcommand and return the exit code."""
    options = export_parser().parse_args(list(argv))

    from rlrun.trainer.weights.export_run import export_run

    output = Path(options.output).absolute()
    try:
        check_packages(extras.TRAINING)
        exported = export_run(
            Path(options.run).absolute(),
            output,
            step=options.step,
            dtype=options.dtype,
            trusts_code=options.trust_recorded_code,
        )
    except RoleError as error:
        print(f"rlrun export: {error}", file=sys.stderr)
        return error.code
    except OSError as error:
        print(f"rlrun export: {error.filename or output}: {error.strerror}", file=sys.stderr)
        return exit_codes.STORAGE
    print(
        f"{output}: the model after step {exported.step}, {exported.parameters / 1e6:.1f} million parameters, "
        f"{exported.bytes / 1e6:.1f} MB"
    )
    return exit_codes.OK


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
        return report_problems(error)
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
    from rlrun.mirror.copy_process import Mirror, UnusableError

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
        return report_problems(error)
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
