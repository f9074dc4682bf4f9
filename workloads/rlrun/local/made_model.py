"""Creation of a run's model folder before any role needs it: the manifest's tiny model, or the plain copy of a quantized model."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from rlrun.config.models.roles import TRAINING_TASKS
from rlrun.config.models.run_config import RunConfig
from rlrun.hub.fetch import needs_plain_copy
from rlrun.hub.repository import keep_revisions
from rlrun.local.preflight import PreflightError
from rlrun.local.supervisor import last_lines
from rlrun.protocol.files.paths import RunPaths
from rlrun.protocol.files.volume_faults import show_size
from rlrun.runtime import exit_codes
from rlrun.runtime.bootstrap import module_command

_POLL_SECONDS = 0.1
_TINY_MODEL, _PLAIN_COPY = "rlrun.trainer.modeling.tiny_model", "rlrun.trainer.plain_copy"


def prepare_model(
    config: RunConfig,
    file: Path,
    paths: RunPaths,
    attempt: int,
    say: Callable[[str], None],
    interrupted: Callable[[], bool] = lambda: False,
) -> None:
    """Create the tiny model of the manifest, or the plain copy of a quantized model, unless it exists.

    The folder becomes visible only after it is complete.

    Args:
        config: configuration of the run.
        file: file with this configuration.
        paths: paths of the run's folder.
        attempt: number of the attempt, for the log.
        say: function that prints a line.
        interrupted: function that returns whether to stop. It is needed because a warm-up runs an environment's code, which may hang.

    Raises:
        PreflightError: the model could not be created; the message contains the end of its log.
        RoleError: the model's configuration cannot be downloaded, or the model cannot be trained.
        KeyboardInterrupt: `interrupted` returned True.
    """
    if paths.model.is_dir() or (config.trainer.task not in TRAINING_TASKS and config.trainer.model.tiny is None):
        return
    tiny = config.trainer.model.tiny
    if tiny is None:
        keep_revisions(paths)
        if not needs_plain_copy(config.trainer.model):
            return
    what = "the copy of the quantized model" if tiny is None else "the tiny model"
    warm_up = f" with a warm-up on {tiny.warmup_environment}" if tiny is not None and tiny.warmup_environment else ""
    began = time.monotonic()
    say(f"creating {what}{warm_up}")
    log = paths.logs(attempt, "trainer") / "model.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    code = _run_program(_PLAIN_COPY if tiny is None else _TINY_MODEL, file, log, interrupted)
    if code or not paths.model.is_dir():
        lines = "\n".join(f"  | {line}" for line in last_lines(log))
        raise PreflightError(
            f"{what} could not be created (exit code {code}):\n{lines}\n  its log: {log}",
            exit_codes.FAILURE,
        )
    size = sum(path.stat().st_size for path in paths.model.rglob("*") if path.is_file())
    say(f"created {what} in {time.monotonic() - began:.0f} s: {show_size(size)}")


def _run_program(module: str, file: Path, log: Path, interrupted: Callable[[], bool]) -> int:
    """Run a program that creates the model, and return its exit code; raises `KeyboardInterrupt` if `interrupted` returns True."""
    command = module_command(module, ["--config", str(file)])
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
        code = making.wait()
    return code
