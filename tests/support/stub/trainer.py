"""A trainer pod without torch: `python -m tests.support.stub.trainer --config run.json`.

Attempts, channel, manifests, retention, metrics' names and exit codes are the real trainer's. One process represents
all ranks of its pod. If a signal requests a stop, the group saves the last finished step, as the real trainer does.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from loguru import logger

from rlrun.diagnostics import stacks
from rlrun.protocol.files.failures import RoleError, write_error
from rlrun.protocol.files.paths import RunPaths
from rlrun.runtime import exit_codes
from rlrun.trainer.__main__ import configure_log
from rlrun.trainer.ranks.launch import attempt_number, read_config
from rlrun.trainer.ranks.stop import Stop


def main(argv: Sequence[str] | None = None) -> int:
    """Run one pod's process; return its exit code."""
    parser = argparse.ArgumentParser(prog="trainer", description="One pod of the trainer, without torch.")
    parser.add_argument("--config", type=Path, required=True, help="the run's resolved configuration, run.json")
    options = parser.parse_args(argv)
    stacks.answer_requests()
    stop = Stop()
    stop.start_listening()
    configure_log(0)
    folder: Path | None = None
    try:
        config, attempt = read_config(options.config), attempt_number()
        folder = RunPaths(Path(config.output_dir)).logs(attempt, "trainer")
        if config.weight_sync.transport != "Filesystem":
            raise RoleError(
                f"weightSync.transport ({config.weight_sync.transport}) needs the real trainer; the stub has Filesystem alone",
                exit_codes.CONFIGURATION,
            )
        api_key = os.environ.get("RLRUN_API_KEY", "")
        if not api_key:
            raise RoleError(
                "RLRUN_API_KEY is not set: the channel to the orchestrator needs the run's key", exit_codes.USAGE
            )
        # After the signals are blocked: numpy starts threads, and a thread that does not block a signal would receive
        # it.
        from tests.support.stub.loop import run

        code = run(config, attempt=attempt, api_key=api_key, stop=stop)
        if stop.is_requested and stop.number is None:
            write_error(folder, "trainer", RoleError(f"stopped by {stop.origin}", code))
        return code
    except RoleError as error:
        logger.error(str(error))
        failure = error
    except Exception as error:
        logger.opt(exception=error).error("the trainer failed")
        failure = RoleError(f"{type(error).__name__}: {error}", exit_codes.FAILURE)
    write_error(folder, "trainer", failure)
    return failure.code


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)  # threads may still wait for messages, but nothing remains to be written
