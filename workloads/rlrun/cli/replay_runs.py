"""`rlrun replay` and `fork`: a recorded step or checkpoint of a run as the start of new work.

- `replay` computes a step of a run again, compares it with the recorded step, and explains a sample.
- `fork` creates a new run that starts from a checkpoint of another run.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from rlrun.cli.run_options import one_line_errors, print_document, run_argument, runs_parser, the_run
from rlrun.config.loading.parser import Parser, whole_number
from rlrun.config.loading.problems import ConfigError
from rlrun.inspect.source import ClusterRun, FolderRun
from rlrun.protocol.files.failures import RoleError
from rlrun.protocol.files.recorded_code import FLAG, HELP
from rlrun.runtime import exit_codes, extras


def replay_parser() -> Parser:
    """Return the parser of `rlrun replay`."""
    text = "Compute a step of a run again from its folder, compare it with the record, and explain a sample. The folder is not changed."
    p = runs_parser("replay", text, output="json")
    p.add_argument("run", metavar="RUN", help="folder of a run (runs/NAME); the run may be active")
    p.add_argument("--step", type=whole_number(1), metavar="N", required=True, help="step to compute")
    p.add_argument(
        "--sample", metavar="SAMPLE", help="sample to explain: index in the batch, GROUP/ROLLOUT, or the id of a task"
    )
    p.add_argument("--no-compute", action="store_true", help="explain only from the batch, without the model")
    p.add_argument(
        "--ranks",
        type=whole_number(1, 64),
        metavar="N",
        help="compute with N ranks on CPUs instead of the run's layout",
    )
    p.add_argument("--model", type=Path, metavar="DIR", help="folder of the model, if it differs on this machine")
    p.add_argument(FLAG, action="store_true", help=HELP)
    return p


@one_line_errors("replay")
def run_replay(argv: Sequence[str]) -> int:
    """Run `rlrun replay` and return the exit code: 0 if equal, 1 if different, 64 and above if the step cannot be computed."""
    options = replay_parser().parse_args(list(argv))
    run = the_run(options)
    if not isinstance(run, FolderRun):
        print(
            f"rlrun replay: {run.name} is a run in a cluster; copy its folder with "
            f"`rlrun pull {run_argument(run, options, 'run')} --to DIR`, "
            "then run `rlrun replay DIR --step N`",
            file=sys.stderr,
        )
        return exit_codes.USAGE
    if options.no_compute and options.sample is None:
        print("rlrun replay: --no-compute needs a sample: set --sample", file=sys.stderr)
        return exit_codes.USAGE
    from rlrun.local.preflight import check_packages

    try:
        if not options.no_compute:
            check_packages(extras.TRAINING)
        return _print_replay(
            run.root,
            options.step,
            sample=options.sample,
            computes=not options.no_compute,
            ranks=options.ranks,
            model=options.model,
            form=options.output,
            trusts_code=options.trust_recorded_code,
        )
    except RoleError as error:
        print(f"rlrun replay: {error}", file=sys.stderr)
        return error.code
    except KeyboardInterrupt:
        print("rlrun replay: interrupted; the run is unchanged", file=sys.stderr)
        return exit_codes.INTERRUPTED


def _print_replay(
    root: Path,
    step: int,
    *,
    sample: str | None,
    computes: bool,
    ranks: int | None,
    model: Path | None,
    form: str | None,
    trusts_code: bool,
) -> int:
    from rlrun.replay import step_replay

    found = step_replay.replay_step(
        root, step, sample=sample, computes=computes, ranks=ranks, model=model, trusts_code=trusts_code
    )
    if form is not None:
        print_document(found.document(), form)
    else:
        print(found.text())
    return found.code


def fork_parser() -> Parser:
    """Return the parser of `rlrun fork`."""
    p = runs_parser(
        "fork",
        "Start a new run on this machine from a complete checkpoint of another run, with the same data order and optional changes.",
    )
    p.add_argument("run", metavar="RUN", help="folder of a run (runs/NAME); the run may be active")
    p.add_argument(
        "--step",
        type=whole_number(1),
        metavar="N",
        help="step of the checkpoint (default: the newest complete checkpoint)",
    )
    p.add_argument(
        "--set",
        action="append",
        default=[],
        type=_check_assignment,
        metavar="FIELD=VALUE",
        help="change a field of spec; may be repeated",
    )
    p.add_argument("--name", metavar="NAME", help="name of the new run (default: RUN-STEP)")
    p.add_argument("--folder", type=Path, metavar="DIR", help="folder of the new run (default: runs/NAME)")
    p.add_argument("--manifest", type=Path, metavar="FILE", help="manifest of RUN, if its folder contains no manifest")
    p.add_argument("--start", action="store_true", help="start the new run")
    p.add_argument(FLAG, action="store_true", help=HELP)
    return p


def _check_assignment(text: str) -> str:
    """Check an option `FIELD=VALUE` for a field of `spec`; used as an argparse type."""
    name, equals, value = text.partition("=")
    if not equals:
        name, colon, value = text.partition(":")
        example = f"{name.strip()}={value.strip()}" if colon else f"{name.strip()}=VALUE"
        raise argparse.ArgumentTypeError(f"got {text!r}, expected FIELD=VALUE; write --set {example}")
    path = ".".join(part.strip() for part in name.strip().strip("/.").replace("/", ".").split("."))
    if path != name:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected FIELD=VALUE; write --set {path}={value.strip()}")
    return text


@one_line_errors("fork")
def run_fork(argv: Sequence[str]) -> int:
    """Run `rlrun fork` and return the exit code."""
    options = fork_parser().parse_args(list(argv))
    run = the_run(options)
    if isinstance(run, ClusterRun):
        print(f"rlrun fork: {in_cluster(run.name, run_argument(run, options, 'run'), options.step)}", file=sys.stderr)
        return exit_codes.USAGE
    from rlrun.replay.fork_run import fork_run

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
        print("rlrun fork: interrupted; no folder was created, and RUN is unchanged", file=sys.stderr)
        return exit_codes.INTERRUPTED
    except ConfigError as error:
        print(error, file=sys.stderr)
        return exit_codes.CONFIGURATION
    here, folder = Path.cwd(), made.folder
    short = folder.relative_to(here) if folder.is_relative_to(here) else folder
    words = [str(short / "manifest.yaml"), "--output-dir", str(short), "--resume"]
    print(f"{made.name} starts from step {made.origin.step} of {made.origin.run}, in {short}")
    print("\n".join(f"  {change}" for change in made.origin.changed) or "  no changes")
    print(f"start it with `{shlex.join(['rlrun', 'local', *words])}`")
    if not options.start:
        return exit_codes.OK
    from rlrun.local.local_command import main

    return main(words)


def in_cluster(name: str, pulled: str, step: int | None) -> str:
    """Return the error for a run in a cluster: the RLRun resource cannot start from a state with its data order."""
    at = f", fromStep: {step}" if step is not None else ""
    return (
        f"{name} is a run in a cluster, and an RLRun cannot start from the complete state of another run. Either copy it with "
        f"`rlrun pull {pulled} --to DIR` and run `rlrun fork DIR` on this machine; or apply a manifest on the same claim "
        f"(storage.claimName) with checkpoint.resume {{fromRun: {name}{at}}}, which loads weights and optimizer, but counts "
        "steps and tasks from 0"
    )
