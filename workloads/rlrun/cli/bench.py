"""`--bench` of `trainer`, `rl` and `sft`: the options, and the start of the ranks that are measured."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Collection, Sequence
from pathlib import Path

from rlrun.api.resource import RLRunSpec
from rlrun.config.loading.problems import COMMAND_LINE, ConfigError, Problem
from rlrun.config.loading.yaml_text import Key
from rlrun.config.models.roles import TrainerConfig
from rlrun.config.suggest import did_you_mean
from rlrun.local.preflight import PreflightError, check_packages, free_port
from rlrun.protocol.files.durable import write_json
from rlrun.runtime import extras
from rlrun.trainer.bench_options import BenchOptions


def parser() -> argparse.ArgumentParser:
    """Return the parser of the `--bench` options."""
    p = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    p.add_argument("--bench", action="store_true", help="measure the trainer's step on fake data, then exit")
    p.add_argument("--bench.seq-lens", dest="seq_lens", metavar="N,N", help="lengths to measure (default: seqLen)")
    p.add_argument("--bench.rows", dest="rows", metavar="N", help="micro-batches per rank and step (default 1)")
    p.add_argument("--bench.steps", dest="steps", metavar="N", help="measured steps (default 5)")
    p.add_argument(
        "--bench.warmup", dest="warmup", metavar="N", help="unmeasured steps before the measurement (default 2)"
    )
    output = ("--bench.output", "--bench.output-json")
    p.add_argument(*output, dest="output", metavar="FILE", help="write the measurements as JSON")
    return p


def take_bench(argv: Sequence[str]) -> tuple[list[str], BenchOptions | None]:
    """Split the `--bench` options from a command line. Returns the remaining words, and None without `--bench`.

    Raises:
        ConfigError: a value is not a number, or a `--bench.` option is used without `--bench`.
    """
    try:
        given, rest = parser().parse_known_args(list(argv))
    except argparse.ArgumentError as error:
        raise ConfigError([Problem(COMMAND_LINE, error.argument_name or "--bench", error.message)]) from None
    known = [option for action in parser()._actions for option in action.option_strings]
    for word in rest:
        if word.startswith("--bench"):
            option = word.partition("=")[0]
            close = did_you_mean(option, known) or f"; known: {', '.join(known)}"
            raise ConfigError([Problem(COMMAND_LINE, option, f"unknown option{close}")])
    named = {name: value for name, value in vars(given).items() if name != "bench" and value is not None}
    if not given.bench:
        if named:
            option = "--bench." + next(iter(named)).replace("_", "-")
            raise ConfigError([Problem(COMMAND_LINE, option, "needs --bench")])
        return rest, None
    values: dict[str, object] = {"output": None if given.output is None else str(Path(given.output).absolute())}
    for name, least in (("rows", 1), ("steps", 1), ("warmup", 0)):
        if name in named:
            values[name] = _number(f"--bench.{name}", named[name], least)
    if given.seq_lens is not None:
        values["seq_lens"] = tuple(_number("--bench.seq-lens", part, 2) for part in given.seq_lens.split(","))
    return rest, BenchOptions(**values)  # type: ignore[arg-type]


def _number(option: str, text: str, least: int) -> int:
    if not (text.isascii() and text.isdecimal() and int(text) >= least):
        raise ConfigError([Problem(COMMAND_LINE, option, f"got {text!r}, expected a whole number of at least {least}")])
    return int(text)


def not_benched(_spec: RLRunSpec) -> Collection[Key]:
    """Return the fields of a run's specification that a measurement on fake data does not read."""
    return (("environments",), ("data",), ("algorithm", "advantage"))


def run_bench(config: TrainerConfig, options: BenchOptions) -> int:
    """Start the ranks of `config` on this machine, wait for them and return the exit code."""
    from rlrun.trainer.ranks.launch import torchrun_command

    try:
        check_packages(extras.TRAINING)
    except PreflightError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.code
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "config.json"
        write_json(file, config.model_copy(update={"output_dir": folder}).model_dump(mode="json"))
        command = torchrun_command(config, config_file=file, rendezvous_port=free_port(), attempt=1)
        return subprocess.run(
            [*command, *options.rank_arguments()], env={**os.environ, "RLRUN_ATTEMPT": "1"}
        ).returncode
