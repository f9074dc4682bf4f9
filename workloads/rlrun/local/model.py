"""The tiny model that a manifest asks for, made before anything needs it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from rich.console import Console

from rlrun.config.run import RunConfig
from rlrun.local.preflight import PreflightError
from rlrun.local.supervisor import last_lines
from rlrun.protocol import exit_codes
from rlrun.protocol.paths import RunPaths


def prepare_model(config: RunConfig, file: Path, paths: RunPaths, attempt: int, console: Console) -> None:
    """Make the tiny model that the manifest asks for, unless it is there; a folder appears only when it is whole."""
    if config.trainer.model.tiny is None or paths.model.is_dir():
        return
    console.print("making the tiny model", highlight=False)
    log = paths.logs(attempt, "trainer") / "model.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "rlrun.trainer.tiny_model", "--config", str(file)]
    with log.open("ab") as output:
        result = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            check=False,
        )
    if result.returncode:
        lines = "\n".join(f"  | {line}" for line in last_lines(log))
        raise PreflightError(f"the tiny model could not be made:\n{lines}\n  its log: {log}", exit_codes.FAILURE)
