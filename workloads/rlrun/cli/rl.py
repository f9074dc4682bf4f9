"""`rlrun rl` and `local`: a run on this machine from files and options, and `--bench`.

`--bench` of `trainer`, `rl`, `sft` and `local` measures the ranks of the trainer; its options and the start of these ranks are here.

`rl @ run.toml`, or `rl --trainer @ t.toml --orchestrator @ o.toml --inference @ i.toml --max-steps N`, merges the files into the
specification of a manifest. Fields of the whole run (model, max_steps, seq_len, ...) in a role's file move to the specification; two
different values for one shared field are an error that names both.

`local FILE` runs all roles on this machine. `rlrun.local.local_command` is imported only when a command runs.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from rlrun.api.resolve import resolve_spec
from rlrun.api.resource import RLRunSpec
from rlrun.cli.command_options import (
    call_with_own_options,
    command_arguments,
    print_notices,
    report_problems,
    run_command_line,
)
from rlrun.cli.run_layers import Given, RlConfig, fake_data, read_layer
from rlrun.config.dialects.translate import DIALECT
from rlrun.config.loading.examine import validate_layer
from rlrun.config.loading.layers import Hint, Origin
from rlrun.config.loading.parser import Options, format_with_fixed_width, help_text, own_options
from rlrun.config.loading.problems import COMMAND_LINE, ConfigError, Problem
from rlrun.config.loading.yaml_text import Key
from rlrun.config.models.roles import TrainerConfig
from rlrun.config.suggest import did_you_mean
from rlrun.local.preflight import PreflightError, check_packages, count_gpus, free_port
from rlrun.protocol.files.durable import write_json
from rlrun.protocol.files.identity import UNCLAIMED
from rlrun.runtime import exit_codes, extras
from rlrun.tracking.options import full_names
from rlrun.trainer.ranks.launch import BenchOptions


def bench_parser() -> argparse.ArgumentParser:
    """Return the parser of the `--bench` options."""
    parser = argparse.ArgumentParser(
        add_help=False,
        allow_abbrev=False,
        exit_on_error=False,
        usage=argparse.SUPPRESS,
        formatter_class=format_with_fixed_width,
    )
    p = parser.add_argument_group("measurement of the training step")
    p.add_argument("--bench", action="store_true", help="measure the trainer's step on fake data, then exit")
    p.add_argument("--bench.seq-lens", dest="seq_lens", metavar="N,N", help="lengths to measure (default: seqLen)")
    p.add_argument("--bench.rows", dest="rows", metavar="N", help="micro-batches per rank and step (default 1)")
    p.add_argument("--bench.steps", dest="steps", metavar="N", help="measured steps (default 5)")
    p.add_argument(
        "--bench.warmup", dest="warmup", metavar="N", help="unmeasured steps before the measurement (default 2)"
    )
    output = ("--bench.output", "--bench.output-json")
    p.add_argument(*output, dest="output", metavar="FILE", help="write the measurements as JSON")
    return parser


def take_bench(argv: Sequence[str]) -> tuple[list[str], BenchOptions | None]:
    """Split the `--bench` options from a command line. Returns the remaining words, and None without `--bench`.

    Raises:
        ConfigError: a value is not a number, or a `--bench.` option is used without `--bench`.
    """
    try:
        given, rest = bench_parser().parse_known_args(list(argv))
    except argparse.ArgumentError as error:
        raise ConfigError([Problem(COMMAND_LINE, error.argument_name or "--bench", error.message)]) from None
    known = [option for action in bench_parser()._actions for option in action.option_strings]
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
    lengths = () if given.seq_lens is None else given.seq_lens.split(",")

    def count(name: str, least: int, default: int) -> int:
        return default if name not in named else _parse_number(f"--bench.{name}", named[name], least)

    return rest, BenchOptions(
        seq_lens=tuple(_parse_number("--bench.seq-lens", part, 2) for part in lengths),
        rows=count("rows", 1, BenchOptions.rows),
        steps=count("steps", 1, BenchOptions.steps),
        warmup=count("warmup", 0, BenchOptions.warmup),
        output=None if given.output is None else str(Path(given.output).absolute()),
    )


def _parse_number(option: str, text: str, least: int) -> int:
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


def main(argv: Sequence[str] | None = None) -> int:
    """Run `rl` and return the exit code."""
    return run_command_line(lambda: call_with_own_options("rl", command_arguments(argv), run_rl, shown="rl"))


def run_rl(argv: Sequence[str]) -> int:
    """Run the subcommand and return the exit code."""
    usage = "rl [--trainer @ FILE] [--orchestrator @ FILE] [--inference @ FILE]"
    return start_run(argv, RlConfig, prog="rl", usage=usage)


def start_run(words: Sequence[str], model: type[RlConfig], *, prog: str, usage: str) -> int:
    """Start the run that a command line and its files describe; return the exit code.

    Args:
        words: command line without the program's name.
        model: model of the run's configuration.
        prog: name of the program.
        usage: usage line of the help page.
    """
    from rlrun.local.local_command import not_yet

    return not_yet(lambda: _judge_and_start(words, model, prog=prog, usage=usage))


def _judge_and_start(words: Sequence[str], model: type[RlConfig], *, prog: str, usage: str) -> int:
    from rlrun.local.judge import judge_layer, omit_nothing, report_and_stop
    from rlrun.local.local_command import add_options, run_spec

    parser = Options(prog, add_help=False, usage=argparse.SUPPRESS)
    add_options(parser)
    if "--help" in words or "-h" in words:
        print(help_text(model, prog=usage))
        print("\n" + parser.format_help().replace("options:", "options of the local run:").strip())
        print("\n" + bench_parser().format_help().strip())
        return exit_codes.OK
    try:
        options, rest = parser.parse_known_args(full_names(words))
    except SystemExit:
        return exit_codes.USAGE
    try:
        rest, bench = take_bench(rest)
        given = read_layer(
            rest, os.environ, model, hints=_local_hints(options), also=own_options(parser), gpus=count_gpus()
        )
        bench = bench or fake_data(given.layer)
        if given.dry_run:
            print_notices(given.layer.notices)
            config = validate_layer(model, given.layer)
            folder = options.output_dir or config.output_dir or str(Path("runs") / config.name)
            print(
                resolve_spec(config.spec(), name=config.name, uid=UNCLAIMED, output_dir=folder).model_dump_json(
                    indent=2
                )
            )
            return exit_codes.OK
        check_packages(extras.TRAINING)
    except PreflightError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.code
    except ConfigError as error:
        return report_problems(error)
    judged = judge_layer(model, given.layer, leave_out=omit_nothing if bench is None else not_benched)
    code = report_and_stop(judged)
    if code is not None or judged.run is None:
        return code or exit_codes.CONFIGURATION
    config = judged.run
    _adopt_file_options(options, config, given)
    if bench is not None:
        return run_bench(resolve_spec(config.spec(), name=config.name, uid=UNCLAIMED, output_dir="runs").trainer, bench)

    _warn_of_cpus(config, given)
    from rich.console import Console

    called = shlex.join([prog, *words])
    return run_spec(config.spec(), name=config.name, options=options, console=Console(), command=called)


_GPUS = ("trainer_gpu_ids", "inference_gpu_ids")


def _local_hints(options: argparse.Namespace) -> dict[str, Hint]:
    """Return the options of the local run from which fields of the run are derived."""
    return {
        name: Hint(value, Origin(COMMAND_LINE, "--" + name.replace("_", "-"), None, "kebab"))
        for name in _GPUS
        if (value := getattr(options, name)) is not None
    }


def _adopt_file_options(options: argparse.Namespace, config: RlConfig, given: Given) -> None:
    """Copy local options from the files if the command line does not set them."""
    options.output_dir = options.output_dir or config.output_dir
    options.resume = options.resume or "resume" in given.layer.hints
    for name in _GPUS:
        if getattr(options, name) is None and name in given.layer.hints:
            setattr(options, name, given.layer.hints[name].value)


def _warn_of_cpus(config: RlConfig, given: Given) -> None:
    """Print a notice if a run in PRIME-RL's names uses no GPU on a machine with GPUs; PRIME-RL uses GPUs by default."""
    from rlrun.local.preflight import has_gpus

    if DIALECT in given.layer.hints and config.trainer.gpus_per_replica == 0 and has_gpus():
        print(
            "note: the run sets no GPUs, so it uses CPUs; add --trainer-gpu-ids and --inference-gpu-ids",
            file=sys.stderr,
        )


def read_rl_config(
    argv: Sequence[str], env: Mapping[str, str], model: type[RlConfig] = RlConfig
) -> tuple[RlConfig, list[Path], bool]:
    """Return the configuration, its files, and whether the command only prints it (`--dry-run`).

    Raises:
        ConfigError: every problem of every source.
    """
    given = read_layer(argv, env, model)
    return validate_layer(model, given.layer), given.files, given.dry_run


if __name__ == "__main__":
    sys.exit(main())


def print_local_help() -> int:
    """Print the options of `rlrun local` and of its measurement; return the exit code."""
    from rlrun.local.local_command import local_parser

    print(local_parser().format_help())
    print(bench_parser().format_help().strip())
    return exit_codes.OK


def run_local(argv: Sequence[str]) -> int:
    """Run the subcommand and return the exit code."""
    if "--help" in argv or "-h" in argv:
        return print_local_help()
    if "--bench" in argv:
        from rlrun.cli.sft import measure_step

        return measure_step(argv)
    from rlrun.local.local_command import main

    return main(argv)
