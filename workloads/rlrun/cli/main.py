"""`rlrun`: dispatch to subcommands. Each subcommand's module is imported only when it runs, so that `rlrun --help` is fast."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

from rlrun.cli.common import arguments, piped
from rlrun.cli.general_options import call_with_own_options
from rlrun.config.suggest import did_you_mean
from rlrun.diagnostics import heap
from rlrun.runtime import exit_codes
from rlrun.runtime.printable import without_direction_controls


class _Later:
    """A subcommand whose module is imported when it is called.

    Args:
        place: import path `module:function` below `rlrun.cli`.
    """

    def __init__(self, place: str) -> None:
        self._place = place

    def found(self) -> Callable[[Sequence[str]], int]:
        """Import the module and return the function."""
        module, _, function = self._place.partition(":")
        with heap.without_collector():
            run: Callable[[Sequence[str]], int] = getattr(importlib.import_module(f"rlrun.cli.{module}"), function)
        return run

    def __call__(self, words: Sequence[str]) -> int:
        return self.found()(words)


class Command(NamedTuple):
    """One subcommand."""

    summary: str
    run: _Later
    """Function that receives the arguments after the subcommand's name and returns the exit code."""


COMMANDS = {
    "init": Command("write a manifest to start from", _Later("files.installation:run_init")),
    "validate": Command("check manifests and report every problem", _Later("checks.validate:run")),
    "render": Command("print the configuration that each role gets from a manifest", _Later("checks.render:run")),
    "convert": Command(
        "make a manifest from configuration files of PRIME-RL, verl or AReaL", _Later("files.convert:run")
    ),
    "fit": Command("check a run against the memory of its GPUs, and suggest changes", _Later("checks.fit:run")),
    "local": Command("run all roles of a manifest on this machine", _Later("local:run")),
    "rl": Command("run reinforcement learning from files and options on this machine", _Later("rl:run")),
    "sft": Command("run supervised fine-tuning on this machine", _Later("sft:run")),
    "trainer": Command("run only the trainer", _Later("roles:trainer")),
    "orchestrator": Command("run only the orchestrator", _Later("roles:orchestrator")),
    "inference": Command("run only one engine", _Later("roles:inference")),
    "eval": Command("measure the policies of a run on held-out tasks", _Later("evaluation:run_eval")),
    "synthesize": Command("write a policy's rollouts as a data set for sft", _Later("evaluation:run_synthesize")),
    "rows": Command(
        "turn a set of problems into rows for the dataset environment, each with a uid", _Later("files.rows:run")
    ),
    "export": Command("write a Hugging Face model folder from a run's checkpoint", _Later("files.export:run")),
    "mirror": Command("copy complete checkpoints and exports of a run to object storage", _Later("files.mirror:run")),
    "track": Command("send a run to its trackers or to other trackers", _Later("track:run")),
    "tiny-model": Command("make a tiny model for tests and first steps", _Later("files.tiny_model:run")),
    "env": Command("list environments, play one episode, or install an environment", _Later("checks.env:run")),
    "get": Command(
        "list runs in the cluster and in folders, with the reason why each run waits", _Later("runs.look:run_get")
    ),
    "status": Command("show a run on one screen", _Later("runs.look:run_status")),
    "why": Command("explain why a run waits, restarted or failed, and what to do", _Later("runs.look:run_why")),
    "watch": Command("follow a run until it is over", _Later("runs.look:run_watch")),
    "logs": Command("print the logs of a run's roles", _Later("runs.logs:run_logs")),
    "rollouts": Command("print rollouts of a step, such as the worst", _Later("runs.rollouts:run_rollouts")),
    "debug": Command("write a bundle for a bug report, without secrets", _Later("runs.debug:run_debug")),
    "compare": Command("show runs side by side", _Later("runs.compare:run_compare")),
    "cost": Command("show the GPU-hours of runs and what they were spent on", _Later("runs.cost:run_cost")),
    "plot": Command("draw a metric of runs", _Later("runs.plot:run_plot")),
    "replay": Command("compute a step of a run again, and explain a sample", _Later("runs.replay:run_replay")),
    "fork": Command("start a new run from a checkpoint of another run", _Later("runs.fork:run_fork")),
    "ui": Command("serve a web page of runs in folders", _Later("runs.ui:run_ui")),
    "ui-team": Command("serve the web page of a team, in a pod of its cluster", _Later("runs.ui_team:run_ui_team")),
    "pull": Command("copy a model, checkpoint, traces, metrics or logs out of a cluster", _Later("runs.pull:run_pull")),
    "put": Command("copy files onto the volume of a run in a cluster", _Later("files.put:run_put")),
    "suspend": Command("save a run and free its GPUs", _Later("runs.change:run_suspend")),
    "resume": Command("continue a suspended run", _Later("runs.change:run_resume")),
    "restart": Command("start the next attempt of a run from its last checkpoint", _Later("runs.change:run_restart")),
    "scale": Command("change the number of a run's engines", _Later("runs.change:run_scale")),
    "set": Command("change fields of a run in a cluster", _Later("runs.change:run_set")),
    "doctor": Command("report what this machine can run, and how to repair the rest", _Later("checks.doctor:run")),
    "crd": Command("print the RLRun resource, for kubectl", _Later("files.installation:run_crd")),
    "charts": Command("print the folder of the Helm charts", _Later("files.installation:run_charts")),
    "completion": Command("print the completion of a shell", _Later("runs.completion:run_completion")),
    "version": Command("print the version", _Later("version:run")),
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
        return piped(lambda: _run(arguments(argv)))


def _run(words: Sequence[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        print(usage())
        return exit_codes.OK if words else exit_codes.USAGE
    name = "version" if words[0] == "--version" else words[0]
    if name not in COMMANDS:
        hint = did_you_mean(name, COMMANDS) or f"; known: {', '.join(COMMANDS)}"
        print(f"rlrun: unknown command {name!r}{hint}", file=sys.stderr)
        return exit_codes.USAGE
    return call(name, words[1:])


def call(name: str, words: Sequence[str]) -> int:
    """Run one subcommand and return the exit code."""
    try:
        return call_with_own_options(name, words, COMMANDS[name].run, shown=f"rlrun {name}")
    except SystemExit as ended:  # --help and wrong options end argparse this way
        return ended.code if isinstance(ended.code, int) else exit_codes.OK
    except KeyboardInterrupt:
        return exit_codes.INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
