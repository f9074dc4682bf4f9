"""One rank of the trainer: `python -m rlrun.trainer --config run.json [--replay DIR]`, started by torchrun."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from loguru import logger

from rlrun.config.loading.loader import load_file
from rlrun.config.loading.problems import ConfigError
from rlrun.config.models.roles import TrainerConfig
from rlrun.config.models.run import fingerprint
from rlrun.diagnostics import crash, heap, stacks
from rlrun.diagnostics.symptoms import lost_peer
from rlrun.protocol.files.failures import RoleError, exit_code_of, write_error
from rlrun.protocol.files.identity import claim, complete
from rlrun.protocol.files.paths import RunPaths
from rlrun.runtime import exit_codes, role_log
from rlrun.trainer.bench_options import BenchOptions
from rlrun.trainer.ranks.stop import Stop
from rlrun.trainer.recompute.job import Job


def configure_log(rank: int) -> None:
    """Log to stderr; rank 0 logs progress, the others only warn."""
    layout = f"{{time:HH:mm:ss}} | {{level: <7}} | trainer{f'[{rank}]' if rank else ''} | {{message}}"
    role_log.configure_log(sys.stderr, layout, level="INFO" if rank == 0 else "WARNING")


def crash_file(rank: int) -> str:
    """Crash file of a rank, in the folder of its group."""
    return f"rank-{rank}"


def read_config(file: Path) -> TrainerConfig:
    """The trainer's part of `run.json`, or a file of the trainer's own fields; what that leaves out is the same on every rank.

    Raises:
        RoleError: the file is missing or wrong; names every wrong field.
    """
    try:
        return claim(load_file(TrainerConfig, file, section="trainer", complete=complete))
    except ConfigError as error:
        raise RoleError(" / ".join(str(error).splitlines()), exit_codes.CONFIGURATION) from None


def attempt_number() -> int:
    """`RLRUN_ATTEMPT`.

    Raises:
        RoleError: it is not set, or not a positive number.
    """
    text = os.environ.get("RLRUN_ATTEMPT", "")
    if not text.isdecimal() or int(text) < 1:
        raise RoleError(f"RLRUN_ATTEMPT has to be the attempt's number, from 1; got {text!r}", exit_codes.USAGE)
    return int(text)


def log_folder(argv: Sequence[str]) -> Path | None:
    """Log folder for the errors of a rank with these arguments; None: a measurement or a replay reports on stderr alone.

    Raises:
        RoleError: as of `read_config` and `attempt_number`.
    """
    options = _parser().parse_args(argv)
    if options.bench is not None or options.recompute is not None:
        return None
    return RunPaths(Path(read_config(options.config).output_dir)).logs(attempt_number(), "trainer")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="trainer", description="One rank of the trainer; torchrun starts it.")
    parser.add_argument("--config", type=Path, required=True, help="the run's resolved configuration, run.json")
    parser.add_argument(
        "--replay",
        type=Path,
        metavar="DIR",
        help="train on the recorded batches of this folder, without an orchestrator",
    )
    parser.add_argument("--bench", type=BenchOptions.read, metavar="JSON", help="measure steps on fake data, and end")
    parser.add_argument("--recompute", type=Job.read, metavar="JSON", help="compute steps of a run again, and end")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one rank; returns its exit code."""
    options = _parser().parse_args(argv)
    stacks.listen()
    crash.listen(crash_file(int(os.environ.get("RANK", "0"))))
    stop = Stop()
    if options.bench is None and options.recompute is None:  # these have nothing to save
        stop.listen()
    configure_log(int(os.environ.get("RANK", "0")))
    folder: Path | None = None
    try:
        config, attempt = read_config(options.config), attempt_number()
        if options.bench is not None:
            from rlrun.trainer.bench import bench

            return bench(config, options.bench)
        if options.recompute is not None:
            from rlrun.trainer.recompute.program import recompute

            return recompute(config, options.recompute)
        folder = RunPaths(Path(config.output_dir)).logs(attempt, "trainer")
        api_key = os.environ.get("RLRUN_API_KEY", "")
        if not api_key and options.replay is None:
            raise RoleError(
                "RLRUN_API_KEY is not set: the channel to the orchestrator needs the run's key", exit_codes.USAGE
            )
        with heap.importing():
            from rlrun.trainer.loop import train
        code = train(
            config,
            attempt=attempt,
            api_key=api_key,
            replay=options.replay,
            config_hash=fingerprint(config),
            stop=stop,
        )
        if stop.asked and stop.number is None:
            write_error(folder, "trainer", RoleError(f"stopped by {stop.why}", code))
        return code
    except RoleError as error:
        if stop.asked:  # peers that have ended already break what this rank still does
            logger.warning(f"stopped, without a checkpoint of the last step: {error}")
            return stop.exit_code
        logger.error(str(error))
        if folder is not None:
            write_error(folder, "trainer", _by_cause(error))
        return exit_code_of(error)
    except Exception as error:
        if stop.asked:
            logger.warning(f"stopped, without a checkpoint of the last step: {type(error).__name__}: {error}")
            return stop.exit_code
        logger.opt(exception=error).error("the trainer failed")
        if folder is not None:
            write_error(folder, "trainer", _by_cause(error))
        return exit_code_of(error)


def _by_cause(error: Exception) -> RoleError:
    """The error for the launcher, marked where it only follows from the end of another rank."""
    told = error if isinstance(error, RoleError) else RoleError(f"{type(error).__name__}: {error}")
    return RoleError(str(told), exit_code_of(error), follows=lost_peer(error))


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)  # threads of a failed group may hang in a collective; nothing is left to be written
