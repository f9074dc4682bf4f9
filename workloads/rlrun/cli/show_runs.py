"""`rlrun get`, `status`, `why` and `watch`."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rlrun.cli.run_options import (
    RUN_HELP,
    camel_case_document,
    cluster_client,
    cluster_flags,
    is_plugin,
    one_line_errors,
    print_document,
    runs_parser,
    say_no_runs,
    the_run,
)
from rlrun.config.loading.parser import Parser, whole_number
from rlrun.inspect import screen
from rlrun.inspect.gpu_cost import with_local_cost
from rlrun.inspect.gpu_use import with_gpus
from rlrun.inspect.kubectl import Api, ClusterError, is_configured
from rlrun.inspect.snapshot import SORT_FIELDS, Snapshot, sort_snapshots
from rlrun.inspect.source import FolderRun, Run, find_run, read_cluster, read_folders, read_run
from rlrun.inspect.why import explain_run
from rlrun.runtime import exit_codes

_HERE = Path("runs")
"""Default folder for the runs of `rlrun local`."""
_CLEAR = "\x1b[H\x1b[2J"
_OVER = ("Complete", "Failed")


def get_parser() -> Parser:
    """Return the parser of `rlrun get`."""
    text = "List runs with the reason why each run waits: all runs in the cluster's namespace and in ./runs, or only the named runs."
    p = runs_parser("get", text, output="wide json yaml name")
    p.add_argument("runs", nargs="*", metavar="RUN", help="runs, or folders with runs (default: all)")
    p.add_argument("-A", "--all-namespaces", action="store_true", help="runs of all namespaces of the cluster")
    p.add_argument(
        "--sort",
        choices=list(SORT_FIELDS),
        metavar="FIELD",
        help=f"order of the runs: {', '.join(SORT_FIELDS)}; numbers from the largest, ages from the newest, unknown values "
        "last (default: namespace and name)",
    )
    return p


@one_line_errors("get")
def run_get(argv: Sequence[str]) -> int:
    """Run `rlrun get` and return the exit code."""
    options, now = get_parser().parse_args(list(argv)), time.time()
    found = read_snapshots(options, now)
    if options.sort is not None:
        found = sort_snapshots(found, options.sort)
    if options.output in ("json", "yaml"):
        print_document([camel_case_document(one) for one in found], options.output)
    elif options.output == "name":
        print("\n".join(one.name if one.place == "cluster" else one.where for one in found))
    elif not found:
        say_no_runs()
    else:
        print(screen.runs_table(found, now, wide=options.output == "wide", everywhere=options.all_namespaces))
        if len(found) == 1 and options.runs and (tree := screen.pods_tree(found[0])):
            print(tree)
    return exit_codes.OK


def read_snapshots(options: argparse.Namespace, now: float) -> list[Snapshot]:
    """Return snapshots of the runs that the arguments `runs` name, or of all runs."""
    return _read_named_runs(options, now) if options.runs else _read_all_runs(options, now)


def _read_named_runs(options: argparse.Namespace, now: float) -> list[Snapshot]:
    found: list[Snapshot] = []
    for word in options.runs:
        folder = Path(word).expanduser()
        below = [] if is_plugin() or not folder.is_dir() else read_folders([folder], now)
        found += below or [
            read_run(find_run(word, cluster_only=is_plugin()), cluster_client(options), now, events=False)
        ]
    return found


def _read_all_runs(options: argparse.Namespace, now: float) -> list[Snapshot]:
    """Return the runs of the cluster and, by default, of ./runs. An unreachable cluster is an error only without local runs."""
    asked = is_plugin() or options.all_namespaces or bool(cluster_flags(options))
    local = [] if asked else read_folders([_HERE], now)
    if not asked and not is_configured(os.environ):
        return local
    try:
        return [*local, *read_cluster(cluster_client(options), now, everywhere=options.all_namespaces)]
    except ClusterError as error:
        if not local:
            raise
        print(f"rlrun: runs of the cluster are not listed: {error}", file=sys.stderr)
        return local


def status_parser() -> Parser:
    """Return the parser of `rlrun status`."""
    p = runs_parser(
        "status",
        "Show a run on one screen: progress, reason for waiting, failures, and suggested actions.",
        output="json yaml",
    )
    p.add_argument("run", metavar="RUN", help=RUN_HELP)
    return p


@one_line_errors("status")
def run_status(argv: Sequence[str]) -> int:
    """Run `rlrun status` and return the exit code."""
    options, now = status_parser().parse_args(list(argv)), time.time()
    cluster = cluster_client(options)
    seen = with_gpus(with_local_cost(read_run(the_run(options), cluster, now), now), cluster, now)
    if options.output:
        print_document(camel_case_document(seen), options.output)
    else:
        print(screen.status_screen(seen, explain_run(seen, now), now))
    return exit_codes.OK


def why_parser() -> Parser:
    """Return the parser of `rlrun why`."""
    text = "Explain why a run waits, restarted or failed, with evidence and suggested actions."
    p = runs_parser("why", text, output="json yaml")
    p.add_argument("run", metavar="RUN", help=RUN_HELP)
    return p


@one_line_errors("why")
def run_why(argv: Sequence[str]) -> int:
    """Run `rlrun why` and return the exit code."""
    options, now = why_parser().parse_args(list(argv)), time.time()
    told = explain_run(read_run(the_run(options), cluster_client(options), now), now)
    if options.output:
        print_document(camel_case_document(told) | {"toDo": list(told.steps())}, options.output)
    else:
        print(screen.explanation_text(told, now))
    return exit_codes.OK


def watch_parser() -> Parser:
    """Return the parser of `rlrun watch`."""
    p = runs_parser(
        "watch",
        "Follow a run until it ends: refresh its status on a terminal, or print one line per change to other outputs.",
    )
    p.add_argument("run", metavar="RUN", help=RUN_HELP)
    p.add_argument(
        "--every",
        type=whole_number(1, 3600),
        default=5,
        metavar="SECONDS",
        help="seconds between two updates (default: 5)",
    )
    return p


@one_line_errors("watch")
def run_watch(argv: Sequence[str]) -> int:
    """Run `rlrun watch` and return the exit code: 0 if the run is Complete, 1 if it has failed."""
    options = watch_parser().parse_args(list(argv))
    run, cluster = the_run(options), cluster_client(options)
    before = ""
    while True:
        now = time.time()
        seen = _read_if_available(run, cluster, now, first=not before)
        if seen is not None:
            before = _print_if_changed(seen, before, now)
            if seen.phase in _OVER:
                return exit_codes.OK if seen.phase == "Complete" else exit_codes.FAILURE
            if isinstance(run, FolderRun) and seen.phase == "Suspended":
                return exit_codes.FAILURE  # a suspended local run has no process that could continue it
        time.sleep(options.every)


def _read_if_available(run: Run, cluster: Api, now: float, *, first: bool) -> Snapshot | None:
    """Return a snapshot, or None if the cluster is temporarily unavailable."""
    try:
        return read_run(run, cluster, now)
    except ClusterError as error:
        if first or error.code == exit_codes.USAGE:
            raise
        print(f"rlrun watch: {error}; retrying", file=sys.stderr)
        return None


def _print_if_changed(seen: Snapshot, before: str, now: float) -> str:
    """Print a snapshot if it differs from `before`; return the printed text."""
    if sys.stdout.isatty():
        text = screen.status_screen(seen, explain_run(seen, now), now)
        print(_CLEAR + text, flush=True)
        return text
    waits = f", waits for {screen.cut_text(seen.wait.text.split(' since ')[0], 120)}" if seen.wait is not None else ""
    reason = f" ({seen.reason})" if seen.reason else ""
    line = f"{seen.phase}{reason}  step {screen.show_steps(seen)}  attempt {seen.attempt}"
    if line != before:
        print(f"{line}{waits}", flush=True)
    return line
