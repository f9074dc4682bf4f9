"""Options that several commands share: the commands that have each option, and the error for all other commands."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence

from rlrun.runtime import exit_codes

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
