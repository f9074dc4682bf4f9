"""Command line arguments of a rank. The launcher parses them too, to find the folder for errors."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rlrun.config.loading.loader import load_file
from rlrun.config.loading.problems import ConfigError
from rlrun.config.models.roles import TrainerConfig
from rlrun.protocol.files.failures import RoleError
from rlrun.protocol.files.identity import claim_identity, complete_role_file
from rlrun.protocol.files.paths import RunPaths
from rlrun.runtime import exit_codes


def rank_parser(
    *, read_bench: Callable[[str], Any] = str, read_recompute: Callable[[str], Any] = str
) -> argparse.ArgumentParser:
    """Return the parser of a rank's arguments.

    Args:
        read_bench: parser of the value of `--bench`; the launcher needs only its presence.
        read_recompute: parser of the value of `--recompute`.
    """
    parser = argparse.ArgumentParser(prog="trainer", description="One rank of the trainer; torchrun starts it.")
    parser.add_argument("--config", type=Path, required=True, help="the run's resolved configuration, run.json")
    parser.add_argument(
        "--replay",
        type=Path,
        metavar="DIR",
        help="train on the recorded batches of this folder, without an orchestrator",
    )
    parser.add_argument("--bench", type=read_bench, metavar="JSON", help="measure steps on fake data and exit")
    parser.add_argument("--recompute", type=read_recompute, metavar="JSON", help="recompute steps of a run and exit")
    return parser


def crash_file(rank: int) -> str:
    """Return the name of a rank's crash file in the folder of its group."""
    return f"rank-{rank}"


def read_config(file: Path) -> TrainerConfig:
    """Read the trainer's section of `run.json`, or a file with only the trainer's fields; every rank gets the same defaults.

    Raises:
        RoleError: the file is missing or invalid; the message names every invalid field.
    """
    try:
        return claim_identity(load_file(TrainerConfig, file, section="trainer", complete=complete_role_file))
    except ConfigError as error:
        raise RoleError(" / ".join(str(error).splitlines()), exit_codes.CONFIGURATION) from None


def attempt_number() -> int:
    """Return the value of `RLRUN_ATTEMPT`.

    Raises:
        RoleError: the variable is not set, or not a positive number.
    """
    text = os.environ.get("RLRUN_ATTEMPT", "")
    if not text.isdecimal() or int(text) < 1:
        raise RoleError(f"RLRUN_ATTEMPT must be the attempt's number, at least 1; got {text!r}", exit_codes.USAGE)
    return int(text)


def log_folder(argv: Sequence[str]) -> Path | None:
    """Return the log folder for errors of a rank with these arguments, or None for a measurement or recomputation, which logs only to
    stderr.

    Raises:
        RoleError: see `read_config` and `attempt_number`.
    """
    options = rank_parser().parse_args(argv)
    if options.bench is not None or options.recompute is not None:
        return None
    return RunPaths(Path(read_config(options.config).output_dir)).logs(attempt_number(), "trainer")
