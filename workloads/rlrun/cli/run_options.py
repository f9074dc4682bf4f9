"""Options, outputs and error handling that the commands on runs share, also as `kubectl rlrun`."""

from __future__ import annotations

import argparse
import functools
import json
import math
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from rlrun.config.loading.parser import Parser
from rlrun.inspect.kubectl import ClusterError, Kubectl
from rlrun.inspect.snapshot import Snapshot
from rlrun.inspect.source import FolderRun, NotFoundError, Run, find_run
from rlrun.inspect.why import Explanation
from rlrun.runtime import exit_codes
from rlrun.runtime.json_types import Json

PLUGIN = "kubectl-rlrun"
"""Program that `kubectl rlrun` starts."""
RUN_HELP = "folder of a run (runs/NAME), or name of a run in the cluster"


def is_plugin() -> bool:
    """Return whether this process was started as `kubectl rlrun`; arguments are then never folders."""
    return Path(sys.argv[0]).name in (PLUGIN, "plugin.py")


def say_no_runs() -> None:
    """Report that there are no runs on standard error, because programs may read standard output."""
    print(f"no runs{'' if is_plugin() else ' (in a cluster, or in ./runs)'}", file=sys.stderr)


def runs_parser(command: str, description: str, *, output: str | None = None) -> Parser:
    """Return the parser of a command on runs, with the cluster options.

    Args:
        command: name of the command.
        description: one line for the help page.
        output: allowed values of `-o`, separated by spaces, such as `json yaml`; None if the command has no `-o`.
    """
    p = Parser(f"{'kubectl rlrun' if is_plugin() else 'rlrun'} {command}", description)
    p.add_argument("-n", "--namespace", metavar="NAME", help="namespace in the cluster (default: that of the context)")
    p.add_argument("--context", metavar="NAME", help="context of the kubeconfig (default: its current one)")
    p.add_argument("--kubeconfig", metavar="FILE", help="kubeconfig (default: the same as kubectl's)")
    if output is not None:
        p.add_argument("-o", "--output", choices=output.split(), help="output format (default: text for people)")
    return p


def cluster_flags(options: argparse.Namespace) -> list[str]:
    """Return the options of `kubectl` that were set."""
    names = ("namespace", "context", "kubeconfig")
    return [f"--{name}={value}" for name in names if (value := getattr(options, name)) is not None]


def cluster_client(options: argparse.Namespace) -> Kubectl:
    """Return a client of the cluster that the options select."""
    return Kubectl(cluster_flags(options))


def the_run(options: argparse.Namespace) -> Run:
    """Return the run that the argument `run` names.

    Raises:
        NotFoundError: the argument is a path without a run.
    """
    return find_run(options.run, cluster_only=is_plugin())


def run_argument(run: Run, options: argparse.Namespace, *more: str) -> str:
    """Return the shell words that name a run in a hint, followed by `more`; for a cluster with the cluster options that were set."""
    if isinstance(run, FolderRun):
        return " ".join([shlex.quote(str(run.root)), *more])
    given = {"-n": options.namespace, "--context": options.context, "--kubeconfig": options.kubeconfig}
    return " ".join(
        [run.name, *more, *(f"{flag} {shlex.quote(value)}" for flag, value in given.items() if value is not None)]
    )


def one_line_errors(command: str) -> Callable[[Callable[[Sequence[str]], int]], Callable[[Sequence[str]], int]]:
    """Return a decorator that turns the errors of a command into one line on standard error and an exit code."""

    def decorate_command(run: Callable[[Sequence[str]], int]) -> Callable[[Sequence[str]], int]:
        @functools.wraps(run)
        def run_with_errors(argv: Sequence[str]) -> int:
            try:
                return run(argv)
            except (ClusterError, NotFoundError) as error:
                print(f"rlrun {command}: {error}", file=sys.stderr)
                return error.code
            except BrokenPipeError:
                raise
            except OSError as error:
                print(
                    f"rlrun {command}: {error.filename or 'this machine'}: {error.strerror or error}", file=sys.stderr
                )
                return exit_codes.FAILURE

        return run_with_errors

    return decorate_command


def camel_case_document(value: Snapshot | Explanation) -> Json:
    """Return a snapshot or an explanation as a JSON document: camelCase names, without fields that are None."""
    return {_camel_case_name(key): _camel_case_keys(one) for key, one in asdict(value).items() if one is not None}


def _camel_case_keys(value: object) -> object:
    if isinstance(value, dict):
        return {_camel_case_name(str(key)): _camel_case_keys(one) for key, one in value.items() if one is not None}
    return [_camel_case_keys(one) for one in value] if isinstance(value, list | tuple) else value


def _camel_case_name(key: str) -> str:
    first, *more = key.split("_")
    return first + "".join(word.title() for word in more)


def _name_non_finite(value: object) -> object:
    """Replace non-finite numbers (such as a diverged loss) with their names, because JSON has no such numbers."""
    if isinstance(value, dict):
        return {key: _name_non_finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_name_non_finite(one) for one in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def print_document(found: object, form: str) -> None:
    """Print a document as JSON or YAML."""
    found = _name_non_finite(found)
    if form == "json":
        print(json.dumps(found, indent=2, ensure_ascii=False))
        return
    import yaml

    print(yaml.safe_dump(found, sort_keys=False, allow_unicode=True), end="")
