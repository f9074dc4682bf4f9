"""`rlrun logs`: print the logs of a run's roles."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rlrun.cli.run_options import RUN_HELP, cluster_client, one_line_errors, runs_parser, the_run
from rlrun.config.loading.parser import Parser, whole_number
from rlrun.inspect import role_logs
from rlrun.inspect.folder_reader import read_folder
from rlrun.inspect.kubectl import Api
from rlrun.inspect.snapshot import Process, Snapshot
from rlrun.inspect.source import FolderRun, NotFoundError, Run, no_reader, read_run
from rlrun.inspect.why import not_there
from rlrun.protocol.files.launcher_record import read_record
from rlrun.protocol.files.paths import Role, RunPaths
from rlrun.runtime import exit_codes
from rlrun.runtime.redact import LogLines

_TAIL = 100
_ON_VOLUME = 'for f in "$0"/*.log; do [ -e "$f" ] || exit 3; echo "==> $f"; tail -n "$1" "$f"; done'
"""Shell command in the orchestrator's container that prints the logs of an attempt whose pods no longer exist."""
_NO_LOGS = 3
"""Exit code of `_ON_VOLUME` if the folder contains no logs."""


def logs_parser() -> Parser:
    """Return the parser of `rlrun logs`."""
    p = runs_parser("logs", "Print the logs of a run's roles, of the newest attempt or another attempt.")
    p.add_argument("run", metavar="RUN", help=RUN_HELP)
    p.add_argument("-f", "--follow", action="store_true", help="print new lines until the run ends")
    p.add_argument(
        "--role",
        choices=("trainer", "inference", "orchestrator", "all"),
        help="role (default: orchestrator, which reports on all roles)",
    )
    p.add_argument(
        "--rank",
        type=whole_number(0),
        metavar="N",
        help="rank of the trainer or index of the engine; in a cluster, index of the pod",
    )
    p.add_argument("--attempt", type=whole_number(1), metavar="N", help="attempt (default: the newest)")
    p.add_argument(
        "--tail",
        type=whole_number(1, 1_000_000),
        default=_TAIL,
        metavar="N",
        help=f"number of last lines (default: {_TAIL})",
    )
    p.add_argument(
        "--previous",
        action="store_true",
        help="logs of the previous process of a restarted container (only in a cluster)",
    )
    return p


@one_line_errors("logs")
def run_logs(argv: Sequence[str]) -> int:
    """Run `rlrun logs` and return the exit code."""
    options = logs_parser().parse_args(list(argv))
    run = the_run(options)
    roles: Sequence[Role] = role_logs.ROLES if options.role == "all" else (options.role or "orchestrator",)
    selection = role_logs.LogSelection(roles, options.rank, options.attempt, options.tail)
    if isinstance(run, FolderRun):
        return _of_folder(run.root, selection, options)
    return _of_cluster(run, selection, options)


def _of_folder(root: Path, selection: role_logs.LogSelection, options: argparse.Namespace) -> int:
    if options.previous:
        raise NotFoundError("--previous works only for runs in a cluster; use --attempt for an earlier attempt")
    if not role_logs.attempt_folders(root):
        lacks = "has no logs; roles that were started by hand write only to their terminals"
        raise NotFoundError(not_there(read_folder(root, time.time()), lacks))
    found = role_logs.list_log_files(root, selection)
    several, filters = len(found) > 1, {file.path: LogLines(os.environ) for file in found}
    ends: list[tuple[role_logs.LogFile, int]] = []
    for file in found:
        lines, end = role_logs.read_last_lines(file, selection.lines, complete_only=options.follow)
        ends.append((file, end))
        for line in lines:
            print(role_logs.show_line(file, line, filters, several=several))
    if options.follow:
        for file, line in role_logs.follow_lines(ends, lambda: _may_write_logs(root)):
            print(role_logs.show_line(file, line, filters, several=several), flush=True)
    return exit_codes.OK


def _may_write_logs(root: Path) -> bool:
    """Return whether a process may still write logs. Without a launcher's record this is unknown, and the user ends the command."""
    record = read_record(RunPaths(root).launcher)
    return record is None or record.alive(time.time())


def _of_cluster(run: Run, selection: role_logs.LogSelection, options: argparse.Namespace) -> int:
    cluster = cluster_client(options)
    seen = read_run(run, cluster, time.time(), events=False)
    found = selected_pods(seen, selection)
    if not found and selection.rank is not None and (there := selected_pods(seen, replace(selection, rank=None))):
        most = max(sum(pod.role == role for pod in there) for role in selection.roles)
        pods = "pod 0" if most == 1 else f"pods 0 to {most - 1}"
        raise NotFoundError(
            f"--rank: got {selection.rank}, but {' and '.join(selection.roles)} of {seen.name} has {pods}; write --rank {most - 1}"
        )
    if not found:
        return _of_volume(cluster, seen, selection)
    more = ["--follow"] if options.follow else []
    more += ["--previous"] if options.previous else []
    if options.follow and len(found) > 1 and selection.rank is not None:
        # kubectl follows one pod, or all pods of a label. No label has the index of an engine.
        roles = " or ".join(
            f"--role {role}" for role in dict.fromkeys(pod.role for pod in found) if role != "orchestrator"
        )
        raise NotFoundError(f"--rank: got {selection.rank} with --follow and {len(found)} roles; write {roles}")
    if options.follow and len(found) > 1:
        label = f"rlrun.io/run={seen.name}" + (
            f",rlrun.io/role={selection.roles[0]}" if len(selection.roles) == 1 else ""
        )
        many = ["--prefix", "--all-containers", f"--max-log-requests={len(found) + 8}"]
        return cluster.run_attached(
            ["logs", "--namespace", seen.where, "-l", label, f"--tail={selection.lines}", *many, *more]
        )
    codes = []
    for pod in found:
        prefix = ["--prefix"] if len(found) > 1 else []
        words = [
            "logs",
            "--namespace",
            seen.where,
            pod.name,
            "-c",
            pod.role,
            f"--tail={selection.lines}",
            *prefix,
            *more,
        ]
        codes.append(cluster.run_attached(words))
    return max(codes)


def selected_pods(seen: Snapshot, selection: role_logs.LogSelection) -> list[Process]:
    """Return the pods whose logs were requested. Engines continue across attempts, so they are selected for every attempt."""
    attempt = selection.attempt or seen.attempt
    found = [p for p in seen.processes if p.role in selection.roles and (p.role == "inference" or p.attempt == attempt)]
    if selection.rank is None:
        return found
    ranked: list[Process] = []
    for role in selection.roles:
        own = [p for p in found if p.role == role]
        ranked += own if role == "orchestrator" else own[selection.rank : selection.rank + 1]
    return ranked


def _of_volume(cluster: Api, seen: Snapshot, selection: role_logs.LogSelection) -> int:
    """Print the logs of an attempt without pods from the volume, through a pod that mounts it."""
    attempt = selection.attempt or seen.attempt
    if not seen.attempt:
        raise NotFoundError(not_there(seen, "has no pods"))
    if attempt > seen.attempt:
        there = "attempt 1" if seen.attempt == 1 else f"attempts 1 to {seen.attempt}"
        raise NotFoundError(f"--attempt: {seen.name} has no attempt {attempt} yet; it has {there}")
    mounted = [p for p in seen.processes if p.role == "orchestrator" and p.ready]
    if not mounted or seen.folder is None:
        there = ", ".join(p.name for p in seen.processes)
        pods = f"has no such pod (existing pods: {there})" if there else "has no pods now"
        raise NotFoundError(
            f"attempt {attempt} {pods}, and its logs on the volume, logs/attempt_{attempt:04d}, cannot be read: {no_reader(seen)}"
        )
    codes = []
    for role in selection.roles:
        folder = f"{seen.folder}/logs/attempt_{attempt:04d}/{role}"
        words = ["exec", "--namespace", seen.where, mounted[0].name, "-c", "orchestrator", "--", "sh", "-c", _ON_VOLUME]
        codes.append(cluster.run_attached([*words, folder, str(selection.lines)]))
    if all(code == _NO_LOGS for code in codes):
        raise NotFoundError(
            f"attempt {attempt} has no logs of {' or '.join(selection.roles)} on its volume; `rlrun status {seen.argument}` shows its roles"
        )
    return max(codes)
