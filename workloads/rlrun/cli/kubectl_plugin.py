"""`kubectl rlrun`: the commands on runs, only for clusters. kubectl starts the program `kubectl-rlrun` from PATH."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rlrun.cli.command_options import command_arguments, run_command_line
from rlrun.cli.completion import ON_RUNS
from rlrun.cli.main import COMMANDS, run_subcommand
from rlrun.config.suggest import did_you_mean
from rlrun.runtime import exit_codes

_FLAGS = ("-n", "--namespace", "--context", "--kubeconfig")


def usage() -> str:
    """Return the help page."""
    lines = [f"  {name:<10} {COMMANDS[name].summary}" for name in ON_RUNS]
    more = "-n, --namespace, --context and --kubeconfig work as in kubectl. kubectl rlrun COMMAND --help prints the options of a command."
    return "\n".join(["usage: kubectl rlrun COMMAND ...", "", "commands:", *lines, "", more])


def main(argv: Sequence[str] | None = None) -> int:
    """Run `kubectl rlrun` and return the exit code."""
    return run_command_line(lambda: _dispatch_command(command_arguments(argv)))


def flags_last(words: Sequence[str]) -> list[str]:
    """Return the command line with kubectl's options moved from before the command to the end."""
    flags: list[str] = []
    rest = list(words)
    while rest and rest[0].partition("=")[0] in _FLAGS:
        taken = 1 if "=" in rest[0] else 2
        flags += rest[:taken]
        rest = rest[taken:]
    return [*rest, *flags]


def _dispatch_command(given: Sequence[str]) -> int:
    words = flags_last(given)
    if not words or words[0] in ("-h", "--help", "help"):
        print(usage())
        return exit_codes.OK if words else exit_codes.USAGE
    if words[0] not in ON_RUNS:
        hint = did_you_mean(words[0], ON_RUNS) or f"; known: {', '.join(ON_RUNS)}"
        print(f"kubectl rlrun: unknown command {words[0]!r}{hint}", file=sys.stderr)
        return exit_codes.USAGE
    return run_subcommand(words[0], words[1:])


if __name__ == "__main__":
    sys.exit(main())
