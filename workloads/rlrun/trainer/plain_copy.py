"""Program that writes the plain copy of a run's quantized model: `python -m rlrun.trainer.plain_copy --config run.json`.

It runs before the ranks of the trainer start. The architecture is checked first, because the copy of a large model takes long.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rlrun.config.models.run_config import RunConfig
from rlrun.protocol.files.failures import RoleError, write_error
from rlrun.protocol.files.paths import RunPaths
from rlrun.runtime import exit_codes
from rlrun.trainer.modeling.dequantize import make_plain_copy
from rlrun.trainer.proof.start_check import check_folder


def main(argv: Sequence[str] | None = None) -> int:
    """Write the copy unless it exists or the model is not quantized, and return the exit code."""
    parser = argparse.ArgumentParser(prog="plain_copy", description="Write the plain copy of a run's quantized model.")
    parser.add_argument("--config", type=Path, required=True, help="the run's resolved configuration, run.json")
    options = parser.parse_args(argv)
    config = RunConfig.model_validate_json(options.config.read_text()).trainer

    def check(folder: str) -> None:
        model = config.model
        check_folder(
            folder, trust_remote_code=model.trust_remote_code, seq_len=config.seq_len, model_class=model.class_
        )

    try:
        make_plain_copy(config.model, RunPaths(Path(config.output_dir)), check=check)
    except RoleError as error:
        print(f"plain_copy: {error}", file=sys.stderr)
        write_error(None, "trainer", error)
        return error.code
    return exit_codes.OK


if __name__ == "__main__":
    sys.exit(main())
