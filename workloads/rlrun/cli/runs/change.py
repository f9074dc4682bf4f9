"""`rlrun suspend`, `resume`, `restart`, `scale` and `set`."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

from rlrun.cli.runs.common import RUN_HELP, answered, api, argument, runs_parser, the_run
from rlrun.config.loading.parser import Parser, whole_number
from rlrun.inspect.change import WordError, patch_of
from rlrun.inspect.kubectl import RUNS, ask_json
from rlrun.inspect.source import ClusterRun, FolderRun, NotFoundError, Run
from rlrun.inspect.times import rfc3339
from rlrun.runs import acts
from rlrun.runtime import exit_codes
from rlrun.runtime.json_types import Json

_RESTART = "rlrun.io/restart-requested-at"


def _parser(command: str, description: str) -> Parser:
    p = runs_parser(command, description)
    p.add_argument("run", metavar="RUN", help=RUN_HELP)
    p.add_argument(
        "--dry-run", action="store_true", help="ask the API server whether it would take the change, and change nothing"
    )
    return p


def suspend_parser() -> Parser:
    """The command line of `rlrun suspend`."""
    return _parser(
        "suspend",
        "Save the last trained step, free all GPUs, and keep the run. On this machine: stop its launcher as Ctrl-C does.",
    )


def resume_parser() -> Parser:
    """The command line of `rlrun resume`."""
    return _parser("resume", "Go on with a suspended run. On this machine: print the command that does.")


def restart_parser() -> Parser:
    """The command line of `rlrun restart`."""
    return _parser(
        "restart",
        "Begin the next attempt from the last complete checkpoint, which does not count; also of a failed run.",
    )


def scale_parser() -> Parser:
    """The command line of `rlrun scale`."""
    p = _parser("scale", "Change the number of engines of a run in a cluster, while it trains.")
    p.add_argument(
        "--inference",
        type=whole_number(1, 1024),
        required=True,
        metavar="N",
        help="number of engines (spec.inference.replicas)",
    )
    p.add_argument(
        "--min-available",
        type=whole_number(1, 1024),
        metavar="N",
        help="engines without which nothing is sampled (spec.inference.minAvailable)",
    )
    return p


def set_parser() -> Parser:
    """The command line of `rlrun set`."""
    p = _parser(
        "set",
        "Change fields of a run in a cluster; most of them only while it is suspended, which the API server says.",
    )
    p.add_argument(
        "fields",
        nargs="+",
        metavar="FIELD=VALUE",
        help="field of spec and its new value (YAML; null removes it): maxSteps=2000",
    )
    return p


@answered("suspend")
def run_suspend(argv: Sequence[str]) -> int:
    """Run `rlrun suspend`; returns the exit code."""
    options = suspend_parser().parse_args(list(argv))
    run = the_run(options)
    if isinstance(run, FolderRun):
        _stop(run, options)
        return exit_codes.OK
    _patch(run, {"spec": {"suspend": True}}, options)
    _say(
        f"{run.name} saves its last trained step and frees its pods; `rlrun watch {argument(run, options)}` follows it",
        options,
    )
    return exit_codes.OK


@answered("resume")
def run_resume(argv: Sequence[str]) -> int:
    """Run `rlrun resume`; returns the exit code."""
    options = resume_parser().parse_args(list(argv))
    run = the_run(options)
    if isinstance(run, FolderRun):
        record = acts.launcher_of(run)
        if record is not None and record.alive(time.time()):
            raise NotFoundError(f"{run.root} runs already (process {record.pid} on {record.host})")
        raise NotFoundError(
            f"a run on this machine is gone on with in a terminal of its own: {acts.go_on_command(run)}"
        )
    _patch(run, {"spec": {"suspend": False}}, options)
    _say(f"{run.name} goes on from its last complete checkpoint", options)
    return exit_codes.OK


@answered("restart")
def run_restart(argv: Sequence[str]) -> int:
    """Run `rlrun restart`; returns the exit code."""
    options = restart_parser().parse_args(list(argv))
    run = the_run(options)
    if isinstance(run, FolderRun):
        if acts.is_running(run):
            _stop(run, options)
        print(f"then go on with it: {acts.go_on_command(run)}")
        return exit_codes.OK
    cluster = api(options)
    phase = ask_json(cluster, ["get", RUNS, run.name]).get("status", {}).get("phase")
    if phase == "Complete":
        raise NotFoundError(
            f"{run.name} is Complete; with more steps it goes on: rlrun set {argument(run, options, 'maxSteps=N')}"
        )
    _patch(run, {"metadata": {"annotations": {_RESTART: rfc3339(time.time())}}}, options)
    _say(f"{run.name} begins its next attempt from the last complete checkpoint; it does not count", options)
    return exit_codes.OK


@answered("scale")
def run_scale(argv: Sequence[str]) -> int:
    """Run `rlrun scale`; returns the exit code."""
    options = scale_parser().parse_args(list(argv))
    run = _in_cluster(the_run(options), "scale")
    engines = {"replicas": options.inference}
    if options.min_available is not None:
        engines["minAvailable"] = options.min_available
    _patch(run, {"spec": {"inference": engines}}, options)
    _say(f"{run.name} has {options.inference} engines as soon as there is room for them", options)
    return exit_codes.OK


@answered("set")
def run_set(argv: Sequence[str]) -> int:
    """Run `rlrun set`; returns the exit code."""
    options = set_parser().parse_args(list(argv))
    run = _in_cluster(the_run(options), "set")
    try:
        patch = patch_of(options.fields)
    except WordError as error:
        raise NotFoundError(str(error)) from None
    _patch(run, patch, options)
    _say(f"{run.name} is changed; `rlrun why {argument(run, options)}` says when it takes effect", options)
    return exit_codes.OK


def _in_cluster(run: Run, command: str) -> ClusterRun:
    if isinstance(run, FolderRun):
        raise NotFoundError(
            f"{command} is for runs in a cluster; on this machine edit the manifest, and go on with --resume"
        )
    return run


def _patch(run: ClusterRun, change: Json, options: argparse.Namespace) -> None:
    acts.patch(api(options), run.name, change, dry_run=options.dry_run)


def _say(text: str, options: argparse.Namespace) -> None:
    print(f"the API server would take it: {text}" if options.dry_run else text)


def _stop(run: FolderRun, options: argparse.Namespace) -> None:
    pid = acts.ask_to_stop(run, dry_run=options.dry_run)
    if options.dry_run:
        print(f"would ask process {pid} to save and stop", file=sys.stderr)
        return
    print(
        f"asked process {pid} to save and stop; `rlrun status {argument(run, options)}` shows when it has",
        file=sys.stderr,
    )
