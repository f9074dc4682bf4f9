"""`rl @ run.toml`, or `rl --trainer @ t.toml --orchestrator @ o.toml --inference @ i.toml --max-steps N`: a local run from files.

The files are merged into the specification of a manifest. Fields of the whole run (model, max_steps, seq_len, ...) in a role's file move
to the specification; two different values for one shared field are an error that names both.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from rlrun.api.resolve import resolve_spec
from rlrun.cli.bench import not_benched, run_bench, take_bench
from rlrun.cli.common import arguments, notices, piped, report
from rlrun.cli.general_options import call_with_own_options
from rlrun.cli.sources.fake_data import fake_data
from rlrun.cli.sources.run_config import RlConfig
from rlrun.cli.sources.run_layers import Given, read_layer
from rlrun.config.dialects.translate import DIALECT
from rlrun.config.loading.examine import validate_layer
from rlrun.config.loading.help import help_text
from rlrun.config.loading.layers import Hint, Origin
from rlrun.config.loading.parser import Options, own_options
from rlrun.config.loading.problems import COMMAND_LINE, ConfigError
from rlrun.local.preflight import PreflightError, check_packages, count_gpus
from rlrun.protocol.files.identity import UNCLAIMED
from rlrun.runtime import exit_codes, extras
from rlrun.tracking.options import full_names


def main(argv: Sequence[str] | None = None) -> int:
    """Run `rl` and return the exit code."""
    return piped(lambda: call_with_own_options("rl", arguments(argv), run_rl, shown="rl"))


def run_rl(argv: Sequence[str]) -> int:
    """Run the subcommand and return the exit code."""
    usage = "rl [--trainer @ FILE] [--orchestrator @ FILE] [--inference @ FILE]"
    return start(argv, RlConfig, prog="rl", usage=usage)


def start(words: Sequence[str], model: type[RlConfig], *, prog: str, usage: str) -> int:
    """Start the run that a command line and its files describe; return the exit code.

    Args:
        words: command line without the program's name.
        model: model of the run's configuration.
        prog: name of the program.
        usage: usage line of the help page.
    """
    from rlrun.local.main import not_yet

    return not_yet(lambda: _start(words, model, prog=prog, usage=usage))


def _start(words: Sequence[str], model: type[RlConfig], *, prog: str, usage: str) -> int:
    from rlrun.local.judge import judge_layer, omit_nothing, report_and_stop
    from rlrun.local.main import add_options, run_spec

    parser = Options(prog, add_help=False, usage=argparse.SUPPRESS)
    add_options(parser)
    if "--help" in words or "-h" in words:
        print(help_text(model, prog=usage))
        print("\n" + parser.format_help().replace("options:", "options of the local run:").strip())
        return exit_codes.OK
    try:
        options, rest = parser.parse_known_args(full_names(words))
    except SystemExit:
        return exit_codes.USAGE
    try:
        rest, bench = take_bench(rest)
        given = read_layer(rest, os.environ, model, hints=_hints(options), also=own_options(parser), gpus=count_gpus())
        bench = bench or fake_data(given.layer)
        if given.dry_run:
            notices(given.layer.notices)
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
        return report(error)
    judged = judge_layer(model, given.layer, leave_out=omit_nothing if bench is None else not_benched)
    code = report_and_stop(judged)
    if code is not None or judged.run is None:
        return code or exit_codes.CONFIGURATION
    config = judged.run
    _adopt(options, config, given)
    if bench is not None:
        return run_bench(resolve_spec(config.spec(), name=config.name, uid=UNCLAIMED, output_dir="runs").trainer, bench)

    _warn_of_cpus(config, given)
    from rich.console import Console

    called = shlex.join([prog, *words])
    return run_spec(config.spec(), name=config.name, options=options, console=Console(), command=called)


_GPUS = ("trainer_gpu_ids", "inference_gpu_ids")


def _hints(options: argparse.Namespace) -> dict[str, Hint]:
    """Return the options of the local run from which fields of the run are derived."""
    return {
        name: Hint(value, Origin(COMMAND_LINE, "--" + name.replace("_", "-"), None, "kebab"))
        for name in _GPUS
        if (value := getattr(options, name)) is not None
    }


def _adopt(options: argparse.Namespace, config: RlConfig, given: Given) -> None:
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


def read(
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
