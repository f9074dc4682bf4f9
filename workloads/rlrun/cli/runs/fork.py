"""`rlrun fork`: a new run that begins in the state of another one."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from rlrun.cli.runs.common import answered, argument, runs_parser, the_run
from rlrun.config.loading.parser import Parser, whole_number
from rlrun.config.loading.problems import ConfigError
from rlrun.inspect.source import ClusterRun
from rlrun.protocol.files.failures import RoleError
from rlrun.protocol.files.recorded_code import FLAG, HELP
from rlrun.runtime import exit_codes


def fork_parser() -> Parser:
    """The command line of `rlrun fork`."""
    p = runs_parser(
        "fork",
        "Begin a new run on this machine from a complete checkpoint of another one, with its data order, perhaps changed.",
    )
    p.add_argument("run", metavar="RUN", help="a run's folder (runs/NAME), which may be under way")
    p.add_argument(
        "--step", type=whole_number(1), metavar="N", help="the checkpoint's step (default: the newest complete one)"
    )
    p.add_argument(
        "--set",
        action="append",
        default=[],
        type=_assignment,
        metavar="FIELD=VALUE",
        help="change a field of spec; may be repeated",
    )
    p.add_argument("--name", metavar="NAME", help="the new run's name (default: RUN-STEP)")
    p.add_argument("--folder", type=Path, metavar="DIR", help="the new run's folder (default: runs/NAME)")
    p.add_argument("--manifest", type=Path, metavar="FILE", help="manifest of RUN, where its folder has none")
    p.add_argument("--start", action="store_true", help="start it")
    p.add_argument(FLAG, action="store_true", help=HELP)
    return p


def _assignment(text: str) -> str:
    """The type of an option: a field of `spec` with its value."""
    name, equals, value = text.partition("=")
    if not equals:
        name, colon, value = text.partition(":")
        example = f"{name.strip()}={value.strip()}" if colon else f"{name.strip()}=VALUE"
        raise argparse.ArgumentTypeError(f"got {text!r}, expected FIELD=VALUE; write --set {example}")
    path = ".".join(part.strip() for part in name.strip().strip("/.").replace("/", ".").split("."))
    if path != name:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected FIELD=VALUE; write --set {path}={value.strip()}")
    return text


@answered("fork")
def run_fork(argv: Sequence[str]) -> int:
    """Run `rlrun fork`; returns the exit code."""
    options = fork_parser().parse_args(list(argv))
    run = the_run(options)
    if isinstance(run, ClusterRun):
        print(f"rlrun fork: {in_cluster(run.name, argument(run, options, 'run'), options.step)}", file=sys.stderr)
        return exit_codes.USAGE
    from rlrun.replay.fork import fork_run

    try:
        made = fork_run(
            run.root,
            step=options.step,
            changes=options.set,
            name=options.name,
            folder=options.folder,
            manifest=options.manifest,
            trusts_code=options.trust_recorded_code,
        )
    except RoleError as error:
        print(f"rlrun fork: {error}", file=sys.stderr)
        return error.code
    except KeyboardInterrupt:
        print("rlrun fork: interrupted; no folder was made, and the run was not changed", file=sys.stderr)
        return exit_codes.INTERRUPTED
    except ConfigError as error:
        print(error, file=sys.stderr)
        return exit_codes.CONFIGURATION
    here, folder = Path.cwd(), made.folder
    short = folder.relative_to(here) if folder.is_relative_to(here) else folder
    words = [str(short / "manifest.yaml"), "--output-dir", str(short), "--resume"]
    print(f"{made.name} begins at step {made.origin.step} of {made.origin.run}, in {short}")
    print("\n".join(f"  {change}" for change in made.origin.changed) or "  nothing is changed")
    print(f"start it with `{shlex.join(['rlrun', 'local', *words])}`")
    if not options.start:
        return exit_codes.OK
    from rlrun.local.main import main

    return main(words)


def in_cluster(name: str, pulled: str, step: int | None) -> str:
    """Words on a run in a cluster, where the resource has no field for a state with its data order."""
    at = f", fromStep: {step}" if step is not None else ""
    return (
        f"{name} is a run in a cluster, and an RLRun cannot begin in another run's whole state. Either "
        f"`rlrun pull {pulled} --to DIR` and `rlrun fork DIR` on this machine; or apply a manifest on the same claim "
        f"(storage.claimName) with checkpoint.resume {{fromRun: {name}{at}}}, which takes weights and optimizer, and counts "
        "steps and tasks from 0"
    )
