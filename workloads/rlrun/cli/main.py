"""`rlrun`: dispatch to subcommands. Each subcommand's module is imported only when it runs, so that `rlrun --help` is fast."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

from rlrun.cli.command_options import call_with_own_options, command_arguments, run_command_line
from rlrun.config.suggest import did_you_mean
from rlrun.diagnostics import heap
from rlrun.runtime import exit_codes
from rlrun.runtime.printable import without_direction_controls


class _LazyCommand:
    """A subcommand whose module is imported when it is called.

    Args:
        import_path: import path `module:function` below `rlrun.cli`.
    """

    def __init__(self, import_path: str) -> None:
        self._import_path = import_path

    def import_function(self) -> Callable[[Sequence[str]], int]:
        """Import the module and return the function."""
        module, _, function = self._import_path.partition(":")
        with heap.without_collector():
            run: Callable[[Sequence[str]], int] = getattr(importlib.import_module(f"rlrun.cli.{module}"), function)
        return run

    def __call__(self, words: Sequence[str]) -> int:
        return self.import_function()(words)


class Command(NamedTuple):
    """One subcommand."""

    summary: str
    run: _LazyCommand
    """Function that receives the arguments after the subcommand's name and returns the exit code."""


COMMANDS = {
    "init": Command("write a manifest to start from", _LazyCommand("installation:run_init")),
    "validate": Command("check manifests and report every problem", _LazyCommand("validate:run_validate")),
    "render": Command(
        "print the configuration that each role gets from a manifest", _LazyCommand("validate:run_render")
    ),
    "convert": Command(
        "make a manifest from configuration files of PRIME-RL, verl or AReaL", _LazyCommand("convert:run")
    ),
    "fit": Command("check a run against the memory of its GPUs, and suggest changes", _LazyCommand("validate:run_fit")),
    "local": Command("run all roles of a manifest on this machine", _LazyCommand("rl:run_local")),
    "rl": Command("run reinforcement learning from files and options on this machine", _LazyCommand("rl:run_rl")),
    "sft": Command("run supervised fine-tuning on this machine", _LazyCommand("sft:run")),
    "trainer": Command("run only the trainer", _LazyCommand("role_commands:trainer")),
    "orchestrator": Command("run only the orchestrator", _LazyCommand("role_commands:orchestrator")),
    "inference": Command("run only one engine", _LazyCommand("role_commands:inference")),
    "eval": Command("measure the policies of a run on held-out tasks", _LazyCommand("evaluation:run_eval")),
    "synthesize": Command("write a policy's rollouts as a data set for sft", _LazyCommand("evaluation:run_synthesize")),
    "rows": Command(
        "turn a set of problems into rows for the dataset environment, each with a uid",
        _LazyCommand("dataset_rows:run_rows"),
    ),
    "export": Command("write a Hugging Face model folder from a run's checkpoint", _LazyCommand("export:run_export")),
    "mirror": Command(
        "copy complete checkpoints and exports of a run to object storage", _LazyCommand("export:run_mirror")
    ),
    "track": Command("send a run to its trackers or to other trackers", _LazyCommand("export:run_track")),
    "tiny-model": Command("make a tiny model for tests and first steps", _LazyCommand("data_files:run_tiny_model")),
    "env": Command("list environments, play one episode, or install an environment", _LazyCommand("env:run")),
    "get": Command(
        "list runs in the cluster and in folders, with the reason why each run waits", _LazyCommand("show_runs:run_get")
    ),
    "status": Command("show a run on one screen", _LazyCommand("show_runs:run_status")),
    "why": Command("explain why a run waits, restarted or failed, and what to do", _LazyCommand("show_runs:run_why")),
    "watch": Command("follow a run until it is over", _LazyCommand("show_runs:run_watch")),
    "logs": Command("print the logs of a run's roles", _LazyCommand("logs:run_logs")),
    "rollouts": Command("print rollouts of a step, such as the worst", _LazyCommand("copies:run_rollouts")),
    "debug": Command("write a bundle for a bug report, without secrets", _LazyCommand("copies:run_debug")),
    "compare": Command("show runs side by side", _LazyCommand("plots:run_compare")),
    "cost": Command("show the GPU-hours of runs and what they were spent on", _LazyCommand("plots:run_cost")),
    "plot": Command("draw a metric of runs", _LazyCommand("plots:run_plot")),
    "replay": Command("compute a step of a run again, and explain a sample", _LazyCommand("replay_runs:run_replay")),
    "fork": Command("start a new run from a checkpoint of another run", _LazyCommand("replay_runs:run_fork")),
    "ui": Command("serve a web page of runs in folders", _LazyCommand("web_pages:run_ui")),
    "ui-team": Command("serve the web page of a team, in a pod of its cluster", _LazyCommand("web_pages:run_ui_team")),
    "pull": Command(
        "copy a model, checkpoint, traces, metrics or logs out of a cluster", _LazyCommand("copies:run_pull")
    ),
    "put": Command("copy files onto the volume of a run in a cluster", _LazyCommand("data_files:run_put")),
    "suspend": Command("save a run and free its GPUs", _LazyCommand("change_runs:run_suspend")),
    "resume": Command("continue a suspended run", _LazyCommand("change_runs:run_resume")),
    "restart": Command(
        "start the next attempt of a run from its last checkpoint", _LazyCommand("change_runs:run_restart")
    ),
    "scale": Command("change the number of a run's engines", _LazyCommand("change_runs:run_scale")),
    "set": Command("change fields of a run in a cluster", _LazyCommand("change_runs:run_set")),
    "doctor": Command(
        "report what this machine can run, and how to repair the rest", _LazyCommand("doctor:run_doctor")
    ),
    "crd": Command("print the RLRun resource, for kubectl", _LazyCommand("installation:run_crd")),
    "charts": Command("print the folder of the Helm charts", _LazyCommand("installation:run_charts")),
    "completion": Command("print the completion of a shell", _LazyCommand("completion:run_completion")),
    "version": Command("print the version", _LazyCommand("version:run_version")),
}


def usage() -> str:
    """Return the help page."""
    lines = [f"  {name:<12} {command.summary}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            "usage: rlrun COMMAND ...",
            "",
            "commands:",
            *lines,
            "",
            "rlrun COMMAND --help prints the options of a command.",
        ]
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run `rlrun` and return the exit code."""
    with without_direction_controls():
        return run_command_line(lambda: _dispatch_command(command_arguments(argv)))


def _dispatch_command(words: Sequence[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        print(usage())
        return exit_codes.OK if words else exit_codes.USAGE
    name = "version" if words[0] == "--version" else words[0]
    if name not in COMMANDS:
        hint = did_you_mean(name, COMMANDS) or f"; known: {', '.join(COMMANDS)}"
        print(f"rlrun: unknown command {name!r}{hint}", file=sys.stderr)
        return exit_codes.USAGE
    return run_subcommand(name, words[1:])


def run_subcommand(name: str, words: Sequence[str]) -> int:
    """Run one subcommand and return the exit code."""
    try:
        return call_with_own_options(name, words, COMMANDS[name].run, shown=f"rlrun {name}")
    except SystemExit as ended:  # --help and wrong options end argparse this way
        return ended.code if isinstance(ended.code, int) else exit_codes.OK
    except KeyboardInterrupt:
        return exit_codes.INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
