"""Parts that all command lines share: printed problems and notices, exit codes, a closed output pipe, and common options.

Each common option has a list of the commands that accept it; all other commands refuse it.
"""

from __future__ import annotations

import os
import select
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from rlrun.config.loading.problems import COMMAND_LINE, ConfigError, Problem
from rlrun.config.loading.schema import few_in_order
from rlrun.runtime import exit_codes, extras
from rlrun.runtime.processes import refuse_inspection


def report_problems(error: ConfigError) -> int:
    """Print every problem and return the exit code: usage if the command line is wrong, else configuration."""
    print(error, file=sys.stderr)
    only_command_line = all(problem.source == COMMAND_LINE for problem in error.problems)
    return exit_codes.USAGE if only_command_line else exit_codes.CONFIGURATION


def report_missing(error: ModuleNotFoundError) -> int:
    """Print the command that installs a missing package and return the exit code.

    Raises:
        ModuleNotFoundError: no extra of RLRun contains the module.
    """
    message = extras.explain_import(error)
    if message is None:
        raise error
    print(f"error: {message}", file=sys.stderr)
    return extras.EXIT_CODE


def print_notices(found: Sequence[Problem]) -> None:
    """Print notices for the user. One line covers all fields of a source with the same message; it lists at most ten."""
    grouped: dict[tuple[str, str], list[Problem]] = {}
    for notice in found:
        grouped.setdefault((notice.source, notice.message), []).append(notice)
    for (_, message), same in grouped.items():
        paths = few_in_order(notice.path for notice in same)
        print(f"note: {replace(same[0], path=paths, message=message)}", file=sys.stderr)


def run_command_line(run: Callable[[], int]) -> int:
    """Run a command and return its exit code; a reader that closes the pipe early (`| head`) causes no traceback.

    First closes this process to debuggers: it holds the user's variables and the run's key, and environments run code as the same user.
    """
    refuse_inspection()
    try:
        code = run()
        sys.stdout.flush()
    except ModuleNotFoundError as error:
        return report_missing(error)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:
        watch = select.poll()
        watch.register(sys.stdout, 0)
        if not watch.poll(0):
            raise  # standard output is open, so another pipe broke
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the interpreter flushes once more at exit
        return 128 + signal.SIGPIPE
    return code


def command_arguments(argv: Sequence[str] | None) -> list[str]:
    """Return the command line without the program's name."""
    return list(sys.argv[1:] if argv is None else argv)


_LOCAL_RUNS = ("local", "rl", "sft", "eval")
_ROLES = ("trainer", "orchestrator", "inference")
_ON_RUNS = (
    *("get", "status", "why", "watch", "logs", "rollouts", "debug", "compare", "cost", "plot", "replay", "fork"),
    *("pull", "put", "suspend", "resume", "restart", "scale", "set"),
)
_WITH_FIELDS = (*_LOCAL_RUNS, *_ROLES, "synthesize", "validate", "render")
_WITH_DEFAULTS = ("validate", "render", "fit")

GENERAL_OPTIONS: Mapping[str, Sequence[str]] = {
    "--dry-run": (
        *(*_LOCAL_RUNS, "synthesize", *_ROLES, "tiny-model"),
        *("suspend", "resume", "restart", "scale", "set"),
    ),
    "--resume": _LOCAL_RUNS,
    "--output-dir": (*_LOCAL_RUNS, "synthesize", *_ROLES, "render", "doctor"),
    "--context": _ON_RUNS,
    "--kubeconfig": _ON_RUNS,
    "--namespace": (*_ON_RUNS, *_WITH_DEFAULTS, "ui-team"),
    "--defaults": _WITH_DEFAULTS,
    "--set": ("fork",),
}
"""Commands that accept an option; every other command refuses it."""


def call_with_own_options(
    command: str, words: Sequence[str], run: Callable[[Sequence[str]], int], *, shown: str
) -> int:
    """Run a command and return its exit code, unless the command line has a shared option that the command does not accept.

    Args:
        command: name of the subcommand.
        words: arguments after the name.
        run: function of the command.
        shown: name of the program in messages.
    """
    if (refusal := refused_option(command, words)) is not None:
        print(f"{shown}: {refusal}", file=sys.stderr)
        return exit_codes.USAGE
    return run(words)


def refused_option(command: str, words: Sequence[str]) -> str | None:
    """Return an error message for the first shared option that a command does not accept, or None.

    Args:
        command: name of the subcommand.
        words: arguments after the name.
    """
    for word in words:
        option = word.partition("=")[0]
        commands = GENERAL_OPTIONS.get(option)
        if commands is None or command in commands:
            continue
        if option == "--set" and command in _WITH_FIELDS:
            return f"{option}: {command} does not have this option; fields of spec are options, such as --max-steps 20"
        return f"{option}: {command} does not have this option, remove it; commands with it: {', '.join(commands)}"
    return None
