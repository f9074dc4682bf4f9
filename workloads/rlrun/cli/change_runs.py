"""`rlrun suspend`, `resume`, `restart`, `scale` and `set`."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

from rlrun.cli.run_options import RUN_HELP, cluster_client, one_line_errors, run_argument, runs_parser, the_run
from rlrun.config.loading.parser import Parser, whole_number
from rlrun.inspect.kubectl import RUNS, ask_json
from rlrun.inspect.run_changes import WordError, patch_of
from rlrun.inspect.snapshot import format_rfc3339
from rlrun.inspect.source import ClusterRun, FolderRun, NotFoundError, Run
from rlrun.runs import run_process
from rlrun.runtime import exit_codes
from rlrun.runtime.json_types import Json

_RESTART = "rlrun.io/restart-requested-at"


def _change_parser(command: str, description: str) -> Parser:
    p = runs_parser(command, description)
    p.add_argument("run", metavar="RUN", help=RUN_HELP)
    p.add_argument("--dry-run", action="store_true", help="validate the change at the API server without applying it")
    return p


def suspend_parser() -> Parser:
    """Return the parser of `rlrun suspend`."""
    return _change_parser(
        "suspend",
        "Save the last trained step, free all GPUs, and keep the run. On this machine: stop the launcher, like Ctrl-C.",
    )


def resume_parser() -> Parser:
    """Return the parser of `rlrun resume`."""
    return _change_parser("resume", "Continue a suspended run. On this machine: print the command that continues it.")


def restart_parser() -> Parser:
    """Return the parser of `rlrun restart`."""
    return _change_parser(
        "restart",
        "Start the next attempt from the last complete checkpoint, also after a failure. It does not count towards the restart limit.",
    )


def scale_parser() -> Parser:
    """Return the parser of `rlrun scale`."""
    p = _change_parser("scale", "Change the number of engines of a run in a cluster, while it trains.")
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
        help="minimum number of engines for sampling (spec.inference.minAvailable)",
    )
    return p


def set_parser() -> Parser:
    """Return the parser of `rlrun set`."""
    p = _change_parser(
        "set",
        "Change fields of a run in a cluster. Most fields can change only while the run is suspended.",
    )
    p.add_argument(
        "fields",
        nargs="+",
        metavar="FIELD=VALUE",
        help="field of spec and its new value in YAML, such as maxSteps=2000; null removes the field",
    )
    return p


@one_line_errors("suspend")
def run_suspend(argv: Sequence[str]) -> int:
    """Run `rlrun suspend` and return the exit code."""
    options = suspend_parser().parse_args(list(argv))
    run = the_run(options)
    if isinstance(run, FolderRun):
        _stop_local_run(run, options)
        return exit_codes.OK
    _patch_cluster_run(run, {"spec": {"suspend": True}}, options)
    _print_result(
        f"{run.name} saves its last trained step and frees its pods; follow it with `rlrun watch {run_argument(run, options)}`",
        options,
    )
    return exit_codes.OK


@one_line_errors("resume")
def run_resume(argv: Sequence[str]) -> int:
    """Run `rlrun resume` and return the exit code."""
    options = resume_parser().parse_args(list(argv))
    run = the_run(options)
    if isinstance(run, FolderRun):
        record = run_process.launcher_of(run)
        if record is not None and record.alive(time.time()):
            raise NotFoundError(f"{run.root} is already running (process {record.pid} on {record.host})")
        raise NotFoundError(
            f"a run on this machine needs its own terminal; continue it with: {run_process.resume_command(run)}"
        )
    _patch_cluster_run(run, {"spec": {"suspend": False}}, options)
    _print_result(f"{run.name} continues from its last complete checkpoint", options)
    return exit_codes.OK


@one_line_errors("restart")
def run_restart(argv: Sequence[str]) -> int:
    """Run `rlrun restart` and return the exit code."""
    options = restart_parser().parse_args(list(argv))
    run = the_run(options)
    if isinstance(run, FolderRun):
        if run_process.is_running(run):
            _stop_local_run(run, options)
        print(f"continue it with: {run_process.resume_command(run)}")
        return exit_codes.OK
    cluster = cluster_client(options)
    phase = ask_json(cluster, ["get", RUNS, run.name]).get("status", {}).get("phase")
    if phase == "Complete":
        raise NotFoundError(
            f"{run.name} is Complete; to continue it, increase its steps: rlrun set {run_argument(run, options, 'maxSteps=N')}"
        )
    _patch_cluster_run(run, {"metadata": {"annotations": {_RESTART: format_rfc3339(time.time())}}}, options)
    _print_result(
        f"{run.name} starts its next attempt from the last complete checkpoint; the attempt does not count towards the restart limit",
        options,
    )
    return exit_codes.OK


@one_line_errors("scale")
def run_scale(argv: Sequence[str]) -> int:
    """Run `rlrun scale` and return the exit code."""
    options = scale_parser().parse_args(list(argv))
    run = _in_cluster(the_run(options), "scale")
    engines = {"replicas": options.inference}
    if options.min_available is not None:
        engines["minAvailable"] = options.min_available
    _patch_cluster_run(run, {"spec": {"inference": engines}}, options)
    _print_result(f"{run.name} gets {options.inference} engines as soon as the cluster has capacity for them", options)
    return exit_codes.OK


@one_line_errors("set")
def run_set(argv: Sequence[str]) -> int:
    """Run `rlrun set` and return the exit code."""
    options = set_parser().parse_args(list(argv))
    run = _in_cluster(the_run(options), "set")
    try:
        patch = patch_of(options.fields)
    except WordError as error:
        raise NotFoundError(str(error)) from None
    _patch_cluster_run(run, patch, options)
    _print_result(
        f"{run.name} is changed; `rlrun why {run_argument(run, options)}` shows when the change takes effect", options
    )
    return exit_codes.OK


def _in_cluster(run: Run, command: str) -> ClusterRun:
    if isinstance(run, FolderRun):
        raise NotFoundError(
            f"{command} works only for runs in a cluster; on this machine edit the manifest and start the run again with --resume"
        )
    return run


def _patch_cluster_run(run: ClusterRun, change: Json, options: argparse.Namespace) -> None:
    run_process.patch_run(cluster_client(options), run.name, change, dry_run=options.dry_run)


def _print_result(text: str, options: argparse.Namespace) -> None:
    print(f"dry run, accepted by the API server: {text}" if options.dry_run else text)


def _stop_local_run(run: FolderRun, options: argparse.Namespace) -> None:
    pid = run_process.request_stop(run, dry_run=options.dry_run)
    if options.dry_run:
        print(f"would send process {pid} the signal to save and stop", file=sys.stderr)
        return
    print(
        f"sent process {pid} the signal to save and stop; `rlrun status {run_argument(run, options)}` shows when it has stopped",
        file=sys.stderr,
    )
