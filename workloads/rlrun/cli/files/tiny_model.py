"""`rlrun tiny-model DIR`: a model of about a million parameters, made here; its options are the fields of `TinyModelConfig`."""

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


def run(argv: Sequence[str]) -> int:
    """Run the subcommand; returns the exit code."""
    if not argv or argv[0] in ("-h", "--help"):
        print(help_text(TinyModelConfig, prog=PROG))
        return exit_codes.OK if argv else exit_codes.USAGE
    if argv[0].startswith(("-", "@")):
        print(f"rlrun tiny-model: the folder comes first: {PROG} [--hidden-size 128 ...]", file=sys.stderr)
        return exit_codes.USAGE
    folder = Path(argv[0])
    try:
        config = load_model(TinyModelConfig, argv[1:], env={}, prog=PROG)
    except ConfigError as error:
        return report(error)
    if folder.exists() and (not folder.is_dir() or os.listdir(folder)):  # noqa: PTH208
        print(f"{folder}: is not empty; choose a new folder or empty this one", file=sys.stderr)
        return exit_codes.USAGE

    if config.warmup_environment is not None:
        for finding in check_user_code((), AlgorithmConfig(), config, here=True):
            print(f"rlrun tiny-model: --warmup-environment: {finding.message}", file=sys.stderr)
            return exit_codes.CONFIGURATION

    try:
        folder.mkdir(parents=True, exist_ok=True)  # refused before torch is loaded

        from rlrun.trainer.modeling.tiny_model import make_tiny_model

        make_tiny_model(folder, config)
    except OSError as error:
        print(
            f"{error.filename or folder}: cannot be written: {error.strerror}; choose another folder", file=sys.stderr
        )
        return exit_codes.STORAGE
    except ValueError as error:
        print(f"rlrun tiny-model: {error}", file=sys.stderr)
        return exit_codes.CONFIGURATION
    print(f"{folder}: tiny model of width {config.hidden_size}, {config.layers} layers")
    return exit_codes.OK
