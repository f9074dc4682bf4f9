"""`rlrun export RUN_FOLDER --output DIR`: write a Hugging Face model folder from a run's checkpoint."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from rlrun.config.loading.parser import Parser, whole_number
from rlrun.config.models.model import DType
from rlrun.local.preflight import check_packages
from rlrun.protocol.files.failures import RoleError
from rlrun.protocol.files.recorded_code import FLAG, HELP
from rlrun.runtime import exit_codes, extras


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
