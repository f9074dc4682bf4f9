"""`rlrun tiny-model DIR`: create a model of about a million parameters; the options are the fields of `TinyModelConfig`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from rlrun.cli.common import report
from rlrun.config.loading.help import help_text
from rlrun.config.loading.loader import load_model
from rlrun.config.loading.problems import ConfigError
from rlrun.config.models.learning import AlgorithmConfig
from rlrun.config.models.model import TinyModelConfig
from rlrun.local.user_code import check_user_code
from rlrun.runtime import exit_codes

PROG = "rlrun tiny-model DIR"


def run_tiny_model(argv: Sequence[str]) -> int:
    """Run the subcommand and return the exit code."""
    if not argv or argv[0] in ("-h", "--help"):
        print(help_text(TinyModelConfig, prog=PROG))
        return exit_codes.OK if argv else exit_codes.USAGE
    if argv[0].startswith(("-", "@")):
        print(f"rlrun tiny-model: write the folder first: {PROG} [--hidden-size 128 ...]", file=sys.stderr)
        return exit_codes.USAGE
    folder = Path(argv[0])
    try:
        config = load_model(TinyModelConfig, argv[1:], env={}, prog=PROG)
    except ConfigError as error:
        return report(error)
    if folder.exists() and (not folder.is_dir() or os.listdir(folder)):  # noqa: PTH208
        print(f"{folder}: the folder is not empty; choose a new folder, or delete its files", file=sys.stderr)
        return exit_codes.USAGE

    if config.warmup_environment is not None:
        for finding in check_user_code((), AlgorithmConfig(), config, here=True):
            print(f"rlrun tiny-model: --warmup-environment: {finding.message}", file=sys.stderr)
            return exit_codes.CONFIGURATION

    try:
        folder.mkdir(
            parents=True, exist_ok=True
        )  # before the slow import of torch, so that an unwritable folder fails at once

        from rlrun.trainer.modeling.tiny_model import make_tiny_model

        make_tiny_model(folder, config)
    except OSError as error:
        print(f"{error.filename or folder}: cannot write: {error.strerror}; choose another folder", file=sys.stderr)
        return exit_codes.STORAGE
    except ValueError as error:
        print(f"rlrun tiny-model: {error}", file=sys.stderr)
        return exit_codes.CONFIGURATION
    print(f"{folder}: tiny model of width {config.hidden_size}, {config.layers} layers")
    return exit_codes.OK
