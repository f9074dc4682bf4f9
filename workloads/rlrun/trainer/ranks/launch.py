"""Command lines of the trainer's ranks, which launchers create and parse without importing torch.

They contain the options of `--bench` and the description of a recomputation. The launcher parses a rank's arguments too, to find the
folder for errors. A launcher starts the whole group, or this machine's part of it.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rlrun.config.loading.loader import load_file
from rlrun.config.loading.problems import ConfigError
from rlrun.config.models.roles import TrainerConfig
from rlrun.protocol.files.failures import RoleError
from rlrun.protocol.files.identity import claim_identity, complete_role_file
from rlrun.protocol.files.paths import RunPaths
from rlrun.runtime import exit_codes
from rlrun.runtime.bootstrap import module_command


@dataclass(frozen=True)
class BenchOptions:
    """Sequence lengths and step counts of a measurement."""

    seq_lens: tuple[int, ...] = ()
    """Tokens per sequence, one row of the table per entry. Default: the run's `seqLen`."""
    rows: int = 1
    """Micro-batches per rank and step; each contains one sequence."""
    steps: int = 5
    """Measured steps."""
    warmup: int = 2
    """Steps before the measured ones."""
    output: str | None = None
    """File for the measurements as JSON."""

    def rank_arguments(self) -> list[str]:
        """Return the command line arguments for a rank."""
        return ["--bench", json.dumps(asdict(self))]

    @classmethod
    def parse_argument(cls, text: str) -> BenchOptions:
        """Parse the argument that `rank_arguments` returns."""
        values = json.loads(text)
        return cls(**values | {"seq_lens": tuple(values["seq_lens"])})


@dataclass(frozen=True)
class Job:
    """Steps to recompute, and the file for the result."""

    output: str
    """JSON file for the result; only rank 0 writes it."""
    batches: tuple[tuple[int, str], ...]
    """Steps in order, each with the folder of its batch."""
    start: str | None = None
    """Folder of the first checkpoint, or None to start from the model."""
    origin: bool = False
    """Whether `start` belongs to another run, whose weights are version 0 of this run."""
    end: str | None = None
    """Folder of the run's own checkpoint after the last step, for a comparison."""
    sample: int | None = None
    """Index of the sample of the last batch to explain, or None."""

    def rank_arguments(self) -> list[str]:
        """Return the command line arguments for a rank."""
        return ["--recompute", json.dumps(asdict(self))]

    @classmethod
    def parse_argument(cls, text: str) -> Job:
        """Parse the argument that `rank_arguments` returns."""
        values = json.loads(text)
        return cls(**values | {"batches": tuple((int(step), str(path)) for step, path in values["batches"])})

    def read_result(self) -> dict[str, object]:
        """Read the result that rank 0 wrote.

        Raises:
            OSError: the file does not exist.
        """
        found: dict[str, object] = json.loads(Path(self.output).read_text())
        return found


def rank_parser(
    *, read_bench: Callable[[str], Any] = str, read_recompute: Callable[[str], Any] = str
) -> argparse.ArgumentParser:
    """Return the parser of a rank's arguments.

    Args:
        read_bench: parser of the value of `--bench`; the launcher needs only its presence.
        read_recompute: parser of the value of `--recompute`.
    """
    parser = argparse.ArgumentParser(prog="trainer", description="One rank of the trainer; torchrun starts it.")
    parser.add_argument("--config", type=Path, required=True, help="the run's resolved configuration, run.json")
    parser.add_argument(
        "--replay",
        type=Path,
        metavar="DIR",
        help="train on the recorded batches of this folder, without an orchestrator",
    )
    parser.add_argument("--bench", type=read_bench, metavar="JSON", help="measure steps on fake data and exit")
    parser.add_argument("--recompute", type=read_recompute, metavar="JSON", help="recompute steps of a run and exit")
    return parser


def crash_file(rank: int) -> str:
    """Return the name of a rank's crash file in the folder of its group."""
    return f"rank-{rank}"


def read_config(file: Path) -> TrainerConfig:
    """Read the trainer's section of `run.json`, or a file with only the trainer's fields; every rank gets the same defaults.

    Raises:
        RoleError: the file is missing or invalid; the message names every invalid field.
    """
    try:
        return claim_identity(load_file(TrainerConfig, file, section="trainer", complete=complete_role_file))
    except ConfigError as error:
        raise RoleError(" / ".join(str(error).splitlines()), exit_codes.CONFIGURATION) from None


def attempt_number() -> int:
    """Return the value of `RLRUN_ATTEMPT`.

    Raises:
        RoleError: the variable is not set, or not a positive number.
    """
    text = os.environ.get("RLRUN_ATTEMPT", "")
    if not text.isdecimal() or int(text) < 1:
        raise RoleError(f"RLRUN_ATTEMPT must be the attempt's number, at least 1; got {text!r}", exit_codes.USAGE)
    return int(text)


def log_folder(argv: Sequence[str]) -> Path | None:
    """Return the log folder for errors of a rank with these arguments, or None for a measurement or recomputation, which logs only to
    stderr.

    Raises:
        RoleError: see `read_config` and `attempt_number`.
    """
    options = rank_parser().parse_args(argv)
    if options.bench is not None or options.recompute is not None:
        return None
    return RunPaths(Path(read_config(options.config).output_dir)).logs(attempt_number(), "trainer")


@dataclass(frozen=True)
class Nodes:
    """Machines of the group, and the number of this machine."""

    count: int = 1
    rank: int = 0
    """Rank of this machine; the machine of rank 0 has the store for the rendezvous."""
    master: str = "127.0.0.1"
    """Address of the machine of rank 0."""


def torchrun_command(
    config: TrainerConfig,
    *,
    config_file: Path,
    rendezvous_port: int,
    attempt: int,
    replay: Path | None = None,
    nodes: Nodes | None = None,
) -> list[str]:
    """Return the command line of torchrun with a static rendezvous and without restarts, because the launcher restarts the group.

    Args:
        config: configuration that defines the number of ranks.
        config_file: file `run.json` that each rank reads.
        rendezvous_port: free port of the first machine.
        attempt: number of the attempt, used as id of the rendezvous, so that ranks of two attempts never join.
        replay: folder of recorded batches to train on, without an orchestrator.
        nodes: machines of the group, one per replica. Default: all ranks on this machine.

    The launcher sets `RLRUN_ATTEMPT` and `RLRUN_API_KEY`. The exit code is the code of the first failed rank, whose message is in
    `error.json` of the role's log folder.
    """
    here = nodes or Nodes()
    ranks = config.ranks_per_replica if nodes else config.world_size
    command = module_command("rlrun.trainer.ranks.torchrun")
    command += ["--nnodes", str(here.count), "--node-rank", str(here.rank)]
    command += ["--nproc-per-node", str(ranks), "--max-restarts", "0"]
    command += ["--rdzv-backend", "static", "--rdzv-id", str(attempt)]
    # A little longer than the ranks' own limit, so that they can report why they end.
    command += ["--shutdown-timeout", str(config.checkpoint.grace_period_seconds + 5)]
    command += ["--master-addr", here.master, "--master-port", str(rendezvous_port)]
    # torchrun's option `-m` would put the working directory first on the ranks' import path.
    command += ["--no-python", *module_command("rlrun.trainer", ["--config", str(config_file)], unbuffered=True)]
    return command + (["--replay", str(replay)] if replay is not None else [])
