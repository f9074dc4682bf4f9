"""One rank of the trainer: `python -m rlrun.trainer --config run.json [--replay DIR]`, started by torchrun."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from loguru import logger

from rlrun.config.models.run_config import config_fingerprint
from rlrun.diagnostics import heap, stacks
from rlrun.diagnostics.symptoms import lost_peer
from rlrun.protocol.files.failures import RoleError, exit_code_of, write_error
from rlrun.protocol.files.paths import RunPaths
from rlrun.runtime import exit_codes, process_logs
from rlrun.trainer.ranks.launch import BenchOptions, Job, attempt_number, crash_file, rank_parser, read_config
from rlrun.trainer.ranks.stop import Stop


def configure_log(rank: int) -> None:
    """Log to stderr: rank 0 from level INFO, other ranks from level WARNING."""
    layout = f"{{time:HH:mm:ss}} | {{level: <7}} | trainer{f'[{rank}]' if rank else ''} | {{message}}"
    process_logs.configure_log(sys.stderr, layout, level="INFO" if rank == 0 else "WARNING")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one rank and return its exit code."""
    options = rank_parser(read_bench=BenchOptions.parse_argument, read_recompute=Job.parse_argument).parse_args(argv)
    stacks.answer_requests()
    stacks.record_crashes(crash_file(int(os.environ.get("RANK", "0"))))
    stop = Stop()
    if options.bench is None and options.recompute is None:  # benchmark and recompute have nothing to save
        stop.start_listening()
    configure_log(int(os.environ.get("RANK", "0")))
    folder: Path | None = None
    try:
        config, attempt = read_config(options.config), attempt_number()
        if options.bench is not None:
            from rlrun.trainer.bench import run_bench

            return run_bench(config, options.bench)
        if options.recompute is not None:
            from rlrun.trainer.recompute import recompute_steps

            return recompute_steps(config, options.recompute)
        folder = RunPaths(Path(config.output_dir)).logs(attempt, "trainer")
        api_key = os.environ.get("RLRUN_API_KEY", "")
        if not api_key and options.replay is None:
            raise RoleError(
                "RLRUN_API_KEY is not set: the channel to the orchestrator needs the run's key", exit_codes.USAGE
            )
        with heap.without_collector():
            from rlrun.trainer.loop import train_runs
        code = train_runs(
            config,
            attempt=attempt,
            api_key=api_key,
            replay=options.replay,
            config_hash=config_fingerprint(config),
            stop=stop,
        )
        if stop.is_requested and stop.number is None:
            write_error(folder, "trainer", RoleError(f"stopped by {stop.origin}", code))
        return code
    except RoleError as error:
        if stop.is_requested:  # peers that ended earlier cause errors in this rank's collectives
            logger.warning(f"stopped; the last step has no checkpoint: {error}")
            return stop.exit_code
        logger.error(str(error))
        if folder is not None:
            write_error(folder, "trainer", _by_cause(error))
        return exit_code_of(error)
    except Exception as error:
        if stop.is_requested:
            logger.warning(f"stopped; the last step has no checkpoint: {type(error).__name__}: {error}")
            return stop.exit_code
        logger.opt(exception=error).error("the trainer failed")
        if folder is not None:
            write_error(folder, "trainer", _by_cause(error))
        return exit_code_of(error)


def _by_cause(error: Exception) -> RoleError:
    """Convert an error for the launcher; `follows` is true if another rank ended first and caused it."""
    told = error if isinstance(error, RoleError) else RoleError(f"{type(error).__name__}: {error}")
    return RoleError(str(told), exit_code_of(error), follows=lost_peer(error))


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)  # threads of a failed group may hang in a collective, so the normal exit would hang too
