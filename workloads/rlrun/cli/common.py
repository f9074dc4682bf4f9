"""Shared parts of the command lines: the conversion of problems to an exit code."""

from __future__ import annotations

import os
import select
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace

from rlrun.config.loading.problems import COMMAND_LINE, ConfigError, Problem
from rlrun.config.loading.schema import few_in_order
from rlrun.runtime import exit_codes, extras
from rlrun.runtime.processes import refuse_inspection


def report(error: ConfigError) -> int:
    """Print every problem; the exit code distinguishes a wrong command line from a wrong configuration."""
    print(error, file=sys.stderr)
    only_command_line = all(problem.source == COMMAND_LINE for problem in error.problems)
    return exit_codes.USAGE if only_command_line else exit_codes.CONFIGURATION


def report_missing(error: ModuleNotFoundError) -> int:
    """Print which command installs the package that a command needs; the exit code.

    Raises:
        ModuleNotFoundError: the module is of no extra.
    """
    message = extras.explain_import(error)
    if message is None:
        raise error
    print(f"error: {message}", file=sys.stderr)
    return extras.EXIT_CODE


def notices(found: Sequence[Problem]) -> None:
    """Print what the user should know; what is said of several fields of one source is one line, with at most ten of them."""
    grouped: dict[tuple[str, str], list[Problem]] = {}
    for notice in found:
        grouped.setdefault((notice.source, notice.message), []).append(notice)
    for (_, message), same in grouped.items():
        paths = few_in_order(notice.path for notice in same)
        print(f"note: {replace(same[0], path=paths, message=message)}", file=sys.stderr)


def piped(run: Callable[[], int]) -> int:
    """The exit code of `run`. A reader that has read enough of its output (`| head`) is no error worth a traceback.

    The process is closed to the environments that it or its roles start: it has its user's variables and the run's key.
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
            raise  # another pipe than this
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the interpreter flushes once more at its end
        return 128 + signal.SIGPIPE
    return code


def arguments(argv: Sequence[str] | None) -> list[str]:
    """The command line without the program's name."""
    return list(sys.argv[1:] if argv is None else argv)
