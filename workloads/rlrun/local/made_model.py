"""Creation of the manifest's tiny model before any role needs it."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from rlrun.config.models.run_config import RunConfig
from rlrun.local.preflight import PreflightError
from rlrun.local.supervisor import last_lines
from rlrun.protocol.files.paths import RunPaths
from rlrun.protocol.files.volume_faults import show_size
from rlrun.runtime import exit_codes
from rlrun.runtime.bootstrap import module_command

_POLL_SECONDS = 0.1


def prepare_model(
    config: RunConfig,
    file: Path,
    paths: RunPaths,
    attempt: int,
    say: Callable[[str], None],
    interrupted: Callable[[], bool] = lambda: False,
) -> None:
    """Create the tiny model of the manifest unless it exists. Its folder becomes visible only after it is complete.

    Args:
        config: configuration of the run.
        file: file with this configuration.
        paths: paths of the run's folder.
        attempt: number of the attempt, for the log.
        say: function that prints a line.
        interrupted: function that returns whether to stop. It is needed because a warm-up runs an environment's code, which may hang.

    Raises:
        PreflightError: the model could not be created; the message contains the end of its log.
        KeyboardInterrupt: `interrupted` returned True.
    """
    if config.trainer.model.tiny is None or paths.model.is_dir():
        return
    began = time.monotonic()
    tiny = config.trainer.model.tiny
    say(
        "creating the tiny model" + (f" with a warm-up on {tiny.warmup_environment}" if tiny.warmup_environment else "")
    )
    log = paths.logs(attempt, "trainer") / "model.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    command = module_command("rlrun.trainer.modeling.tiny_model", ["--config", str(file)])
    with log.open("ab") as output:
        making = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
    try:
        while making.poll() is None:
            if interrupted():
                raise KeyboardInterrupt
            time.sleep(_POLL_SECONDS)
    finally:
        with suppress(ProcessLookupError):  # the warm-up's environment may have left processes
            os.killpg(making.pid, signal.SIGKILL)
        making.wait()
    if making.returncode or not paths.model.is_dir():
        lines = "\n".join(f"  | {line}" for line in last_lines(log))
        raise PreflightError(
            f"the tiny model could not be created (exit code {making.returncode}):\n{lines}\n  its log: {log}",
            exit_codes.FAILURE,
        )
    size = sum(path.stat().st_size for path in paths.model.rglob("*") if path.is_file())
    say(f"created the tiny model in {time.monotonic() - began:.0f} s: {show_size(size)}")
